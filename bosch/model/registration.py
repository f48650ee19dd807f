"""Registration of the hybrid models with transformers' auto classes, by their public functions.

Importing transformers (with torch) takes seconds, which is too long for a command that only reads a
mask. So `import bosch` waits until transformers' auto classes are imported, if they are not yet. It
registers a name for every model type; the classes behind it, which import the family, are made and
registered when a configuration of that type is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bosch.errors import UserError
from bosch.model.families import HYBRID_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CONFIGS = "transformers.models.auto.configuration_auto"


def _later(model_type: str) -> type:
    """A class in the place of the configuration of a hybrid type, which makes that one."""

    class Later:
        def __new__(cls, **fields: Any) -> PreTrainedConfig:
            return register_model(model_type)(**fields)

        @classmethod
        def from_dict(cls, content: dict[str, Any], **options: Any) -> PreTrainedConfig:
            return register_model(model_type).from_dict(content, **options)

    return Later


def _register_names(configs: ModuleType) -> None:
    for model_type in configs.CONFIG_MAPPING:
        if not model_type.startswith(HYBRID_PREFIX):
            configs.AutoConfig.register(HYBRID_PREFIX + model_type, _later(model_type))


class _Finder(MetaPathFinder):
    """Finds transformers' module of auto classes, and registers the names once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _CONFIGS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _register_names(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_model(model_type: str) -> type[PreTrainedConfig]:
    """Register the hybrid form of a model type, and return its configuration's class.

    Harmless when called again. UserError for a type that transformers does not know, or that is no
    decoder.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    import bosch.attention  # noqa: F401  (registers the backends)
    from bosch.hybrid import hybrid_classes, takes_more_than_text

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
    return config


def install() -> None:
    """Register the names of the hybrid types with transformers, now or when it is imported."""
    if _CONFIGS in sys.modules:
        _register_names(sys.modules[_CONFIGS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
