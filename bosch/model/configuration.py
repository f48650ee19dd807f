"""Config classes of the hybrid models."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)
from transformers.models.auto import configuration_auto

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.code_file import code_file
from bosch.model.families import HYBRID_PREFIX, decoder_layers

CODE_FILE = "modeling_hybrid.py"
_TEXT = "text_config"


def takes_more_than_text(model_type: str) -> bool:
    """Whether models of a type have a text decoder as one of their parts."""
    config: Any = CONFIG_MAPPING[model_type]
    return _TEXT in config.sub_configs


def base_classes(model_type: str) -> tuple[Any, Any, Any]:
    """transformers' classes of a family: configuration, decoder, and model with a head."""
    config: Any = CONFIG_MAPPING[model_type]
    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if takes_more_than_text(model_type):
        models = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return config, MODEL_MAPPING[config], models[config]


def _save_of(model_type: str, parent: Any) -> Any:
    """`save_pretrained`, also of models, that writes the code file and names it in the config."""

    @functools.wraps(parent.save_pretrained)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        names = [base.__name__ for base in base_classes(model_type)]
        (folder / CODE_FILE).write_text(code_file(model_type, *names), encoding="utf-8")
        autos = ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]
        places = [f"{CODE_FILE.removesuffix('.py')}.Hybrid{name}" for name in names]
        if takes_more_than_text(model_type):
            autos.append("AutoModelForImageTextToText")
            places.append(places[-1])
        self.auto_map = dict(zip(autos, places, strict=True))
        return parent.save_pretrained(self, save_directory, *args, **kwargs)

    return save_pretrained


def _init_of(model_type: str, parent: Any) -> Any:
    """`__init__` of a hybrid's config class, which keeps a missing pattern of layers missing."""
    fill = parent.__init__

    @functools.wraps(fill)
    def __init__(self: Any, **kwargs: Any) -> None:
        if kwargs.get("hybrid_attention") is not None:
            text = kwargs.get(_TEXT)
            if takes_more_than_text(model_type) and isinstance(text, dict):
                text_class: Any = CONFIG_MAPPING[text["model_type"]]
                kwargs[_TEXT] = _with_layer_types(text, text_class)
            else:
                kwargs = _with_layer_types(kwargs, parent)
        fill(self, **kwargs)

    return __init__


def _with_layer_types(content: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """`content` with an empty pattern of layers, which is refused, in place of a missing one."""
    types = config_class.attribute_map.get("layer_types", "layer_types")
    missing = types in config_class.__dataclass_fields__ and content.get(types) is None
    return {**content, types: []} if missing else content


@functools.cache
def hybrid_config_class(model_type: str) -> Any:
    """Config class of hybrids: the family's, with `hybrid_attention`."""
    base: Any = CONFIG_MAPPING[model_type]
    body = {
        "model_type": HYBRID_PREFIX + model_type,
        "hybrid_attention": None,
        "__annotations__": {"hybrid_attention": "dict | None"},
        "__module__": __name__,
        "save_pretrained": _save_of(model_type, base),
        "__doc__": f"{base.__name__} of a model with full and sliding heads.",
    }
    name = f"Hybrid{base.__name__}"
    created: Any = type(name, (base,), body)
    created.__init__ = _init_of(model_type, created)
    globals()[name] = created
    return created


def __getattr__(name: str) -> Any:
    """A family's config class by its name, for unpickling in another process."""
    for model_type, base in vars(configuration_auto)["CONFIG_MAPPING_NAMES"].items():
        if name == f"Hybrid{base}":
            return hybrid_config_class(model_type)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def is_hybrid(config: Any) -> bool:
    """Whether a configuration is that of a hybrid model."""
    return str(getattr(config, "model_type", "")).startswith(HYBRID_PREFIX)


def hybrid_mask(config: Any) -> HeadMask:
    """The head mask of a hybrid's configuration; UserError if it is damaged.

    It has a row for each layer with full attention in the base model. The weights hold the heads in
    the mask's `head_order`.
    """
    table: Any = getattr(config, "hybrid_attention", None)
    kinds = decoder_layers(config)
    try:
        mask = HeadMask(table["windows"], table["sinks"])
        if mask.shape == (len(kinds.full), kinds.heads):
            return mask
        reason = f"windows must have {len(kinds.full)} rows of {kinds.heads} heads"
    except (TypeError, KeyError, ValueError) as error:
        reason = str(error)
    raise UserError(
        f"{getattr(config, '_name_or_path', '') or 'config.json'}: hybrid_attention is damaged "
        f"({reason}); found {json.dumps(table, default=str):.500}; make the model again"
    )


def base_content(config: Any) -> dict[str, Any]:
    """Content of a hybrid model's configuration in its family's form, without the head layout."""
    content: dict[str, Any] = config.to_dict()
    for name in (
        "hybrid_attention", "model_type", "architectures", "auto_map",
        "_name_or_path", "transformers_version",
    ):  # fmt: skip
        content.pop(name, None)
    return content
