"""Registration of the hybrid models with transformers, at their first use.

transformers has no entry points for models, and importing it (with torch) takes seconds, which is
too long for a command that only reads a mask. So transformers' dictionary of registered model
types is replaced by one that registers a hybrid model at the first look-up of its `hybrid_…` type,
in whatever order bosch and transformers are imported. Other families are not imported, and nothing
of transformers is imported while transformers is loading.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

from bosch.errors import UserError
from bosch.model.families import HYBRID_PREFIX

_CONFIGS = "transformers.models.auto.configuration_auto"


class _ModelTypes(dict[str, Any]):
    """Registered model types; a missing hybrid type is registered when it is looked up."""

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if not isinstance(key, str) or not key.startswith(HYBRID_PREFIX):
            return False
        register_model(key.removeprefix(HYBRID_PREFIX))
        return super().__contains__(key)


def _prepare(configs: ModuleType) -> None:
    """Replace the registered model types of transformers' auto classes by `_ModelTypes`."""
    table = configs.CONFIG_MAPPING
    if not isinstance(table._extra_content, _ModelTypes):
        table._extra_content = _ModelTypes(table._extra_content)


class _Finder(MetaPathFinder):
    """Finds transformers' module of auto classes, and prepares it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _CONFIGS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _prepare(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_model(model_type: str) -> None:
    """Register the hybrid form of a model type; harmless when called again.

    Raises UserError for a type that transformers does not know, or that is no decoder.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    import bosch.attention  # noqa: F401  (registers the backends)
    from bosch.hybrid import hybrid_classes, register_attention, takes_more_than_text

    register_attention()
    try:
        if model_type not in CONFIG_MAPPING:  # an older transformers, as pinned by vLLM's builds
            raise KeyError(model_type)
        config, decoder, model = hybrid_classes(model_type)
    except KeyError:
        raise UserError(
            f"transformers {version('transformers')} has no decoders of type '{model_type}'; "
            "docs/reference/families.md names families that need a newer version"
        ) from None
    AutoConfig.register(HYBRID_PREFIX + model_type, config, exist_ok=True)
    modeling_auto.AutoModelForCausalLM.register(config, model, exist_ok=True)
    modeling_auto.AutoModel.register(config, decoder, exist_ok=True)
    if takes_more_than_text(model_type):
        modeling_auto.AutoModelForImageTextToText.register(config, model, exist_ok=True)


def install() -> None:
    """Prepare transformers' auto classes, now or when they are loaded."""
    if _CONFIGS in sys.modules:
        _prepare(sys.modules[_CONFIGS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
