"""Registration of the hybrid models with transformers, when transformers' auto classes are loaded.

transformers has no entry points for models. Importing it costs seconds and pulls in torch, which a
command that only reads a mask must not pay; so registration waits for the module that holds the
auto classes, whichever of bosch and transformers is imported first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"


class _RegisteringLoader(Loader):
    """Loads a module as its own loader does, then registers."""

    def __init__(self, inner: Loader, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._then()


class _Finder(MetaPathFinder):
    """Finds the trigger modules as everyone else does, and hands out a registering loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (_CONFIGS, _MODELS):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader, lambda: _register(fullname))
                return spec
        return None


def _register(loaded: str) -> None:
    """Called when `loaded` has just been loaded."""
    if loaded == _MODELS:
        importlib.import_module("bosch.hybrid").register_models()
    elif _MODELS not in sys.modules:
        # Only AutoConfig was asked for. The configs cannot be made without the other module.
        importlib.import_module(_MODELS)


def install() -> None:
    """Register now where the auto classes are loaded already, else when they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in (_MODELS, _CONFIGS):
        if name in sys.modules:
            _register(name)
