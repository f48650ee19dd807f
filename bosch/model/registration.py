"""Registration of the hybrid models with transformers, when one is first asked for.

transformers has no entry points for models. Importing it costs seconds and pulls in torch, which a
command that only reads a mask must not pay. So the table of model types is only given a dictionary
that registers a hybrid model at the first look-up of its `hybrid_…` type, whichever of bosch and
transformers is imported first: the code of all other families is not imported either. Nothing of
transformers is imported while it is itself loading.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

from bosch.errors import UserError
from bosch.model.families import FAMILIES, HYBRID_PREFIX

_CONFIGS = "transformers.models.auto.configuration_auto"


class _ModelTypes(dict[str, Any]):
    """Registered model types; a hybrid one that is missing is registered when it is looked up."""

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if not isinstance(key, str) or not key.startswith(HYBRID_PREFIX):
            return False
        register_model(key.removeprefix(HYBRID_PREFIX))
        return super().__contains__(key)


def _prepare(configs: ModuleType) -> None:
    """Put `_ModelTypes` into the table of model types of transformers' auto classes."""
    table = configs.CONFIG_MAPPING
    if not isinstance(table._extra_content, _ModelTypes):
        table._extra_content = _ModelTypes(table._extra_content)


class _PreparingLoader(Loader):
    """Loads a module as its own loader does, then prepares it."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _prepare(module)


class _Finder(MetaPathFinder):
    """Finds the one module as everyone else does, and hands out a preparing loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CONFIGS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PreparingLoader(spec.loader)
                return spec
        return None


def register_model(model_type: str) -> None:
    """Teach transformers the hybrid form of a model type, if it has one; again is harmless."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    from bosch.model.configuration import hybrid_config_class
    from bosch.model.deploy_mode import hybrid_decoder_class, hybrid_model_class
    from bosch.model.interface import register_attention

    register_attention()
    family = FAMILIES.get(model_type)
    if family is None or family.is_part:
        return
    if not family.is_installed:  # in an older transformers, as vLLM's builds pin it
        raise UserError(
            f"transformers {version('transformers')} has no models of type '{model_type}': "
            "docs/reference/families.md names the first version with it; install that or a newer"
        )
    config, model = hybrid_config_class(family), hybrid_model_class(family)
    AutoConfig.register(family.hybrid_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    AutoModel.register(config, hybrid_decoder_class(family), exist_ok=True)
    if family.takes_more_than_text:
        AutoModelForImageTextToText.register(config, model, exist_ok=True)


def install() -> None:
    """Prepare transformers' auto classes now where they are loaded already, else when they are."""
    if _CONFIGS in sys.modules:
        _prepare(sys.modules[_CONFIGS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
