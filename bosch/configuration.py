"""Config classes of the hybrid models."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from bosch.families import Family

CODE_FILE = "modeling_hybrid.py"

# Stands in config.json where the types of the layers would. No layer type of transformers, so that
# its own config classes, given a hybrid directory by name, end with this sentence.
_LAYER_TYPES = [
    "full and sliding heads within a layer: load this model by AutoModelForCausalLM, with bosch "
    "imported or with trust_remote_code=True"
]


def _save_of(family: Family, parent: Any) -> Any:
    """`save_pretrained` of a family that also writes the code file, and names it in the config.

    A model saves its configuration by this too, so no hybrid is saved or pushed without it.
    """

    @functools.wraps(parent.save_pretrained)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        from bosch.code_file import code_file

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CODE_FILE).write_text(code_file(family), encoding="utf-8")
        module = CODE_FILE.removesuffix(".py")
        self.auto_map = {
            "AutoConfig": f"{module}.{family.config_class}",
            "AutoModelForCausalLM": f"{module}.{family.model_class}",
        }
        return parent.save_pretrained(self, save_directory, *args, **kwargs)

    return save_pretrained


def _post_init_of(parent: Any) -> Any:
    """`__post_init__` of a family that finds the base model's layer types where they are kept."""
    is_field = "layer_types" in parent.__dataclass_fields__

    def __post_init__(self: Any, base_layer_types: Any = None, **kwargs: Any) -> None:
        listed = self.layer_types if is_field else kwargs.pop("layer_types", None)
        if listed == _LAYER_TYPES and is_field:
            # The family's default pattern must not stand in for what was lost: none is refused.
            listed = base_layer_types if isinstance(base_layer_types, list) else []
        elif listed is None or listed == _LAYER_TYPES:
            listed = base_layer_types
        if is_field:
            self.layer_types = listed
        elif listed is not None:
            kwargs["layer_types"] = listed
        parent.__post_init__(self, **kwargs)

    return __post_init__


def _to_dict_of(parent: Any) -> Any:
    """`to_dict` of a family in a form that its own config class refuses."""

    @functools.wraps(parent.to_dict)
    def to_dict(self: Any) -> dict[str, Any]:
        content: dict[str, Any] = parent.to_dict(self)
        listed = content.get("layer_types")
        if listed is not None:
            content["base_layer_types"] = listed
        return content | {"layer_types": list(_LAYER_TYPES)}

    return to_dict


@functools.cache
def hybrid_config_class(family: Family) -> Any:
    """Config class of a family's hybrid models: its own, with `hybrid_attention`."""
    module = importlib.import_module(
        f"transformers.models.{family.module}.configuration_{family.module}"
    )
    base = getattr(module, family.base_config_class)
    body = {
        "model_type": family.hybrid_type,
        "hybrid_attention": None,
        "__annotations__": {"hybrid_attention": "dict | None"},
        "__module__": __name__,
        "__post_init__": _post_init_of(base),
        "to_dict": _to_dict_of(base),
        "save_pretrained": _save_of(family, base),
        "__doc__": f"Configuration of a {family.prefix} model with full and sliding heads.",
    }
    created = type(family.config_class, (base,), body)
    globals()[family.config_class] = created
    return created


def is_hybrid(config: Any) -> bool:
    """Whether a configuration is that of a hybrid model."""
    return str(getattr(config, "model_type", "")).startswith("hybrid_")
