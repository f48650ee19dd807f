"""Config classes of the hybrid models."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.code_file import code_file
from bosch.model.families import BASE_PREFIX, HYBRID_PREFIX, decoder_layers

CODE_FILE = "modeling_hybrid.py"
_TEXT = "text_config"

# A message in config.json in place of the activation's name. The families' own config classes
# accept no list there and quote it when they load a hybrid's directory; readers of the file itself,
# or of the tokenizer, still work. It replaces the first of these fields that a configuration has;
# families without the first four have a number in the last.
_ACTIVATIONS = (
    "hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act",
    "initializer_range",
)  # fmt: skip
_REFUSAL = [
    "full and sliding heads within a layer: load this model by AutoModelForCausalLM, with bosch "
    "imported or with trust_remote_code=True"
]

_choosing: ContextVar[bool] = ContextVar("attention may be chosen", default=False)


@contextlib.contextmanager
def choosing_attention() -> Iterator[None]:
    """Allow a hybrid model class to write its attention into a configuration inside the block."""
    token = _choosing.set(True)
    try:
        yield
    finally:
        _choosing.reset(token)


class HybridConfigMixin:
    """Makes a hybrid's config class refuse the attention of other model classes.

    A transformers model class writes its attention into its configuration before it makes a layer.
    A family's own class with a hybrid's configuration fails there, since it would run every head
    full. A user's choice goes through `_attn_implementation`.
    """

    @property
    def _attn_implementation_internal(self) -> Any:
        return self.__dict__.get("_attn_implementation_internal")

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: Any) -> None:
        if not _choosing.get():
            raise UserError(_REFUSAL[0])
        self.__dict__["_attn_implementation_internal"] = value

    @property
    def _attn_implementation(self) -> Any:
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        choose: Any = PreTrainedConfig._attn_implementation
        with choosing_attention():
            choose.fset(self, value)


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
    """`__init__` of a hybrid's config class that accepts the result of `to_dict`."""
    fill = parent.__init__

    @functools.wraps(fill)
    def __init__(self: Any, **kwargs: Any) -> None:
        is_hybrid = kwargs.get("hybrid_attention") is not None
        text = kwargs.get(_TEXT)
        if takes_more_than_text(model_type) and isinstance(text, dict):
            text_class: Any = CONFIG_MAPPING[text["model_type"]]
            kwargs[_TEXT] = _restored(text, text_class, is_hybrid)
        else:
            kwargs = _restored(kwargs, parent, is_hybrid)
        fill(self, **kwargs)
        if takes_more_than_text(model_type):
            self.text_config.__class__ = _part_class(type(self.text_config))

    return __init__


def _restored(content: dict[str, Any], config_class: Any, is_hybrid: bool) -> dict[str, Any]:
    """Content of a text decoder's configuration without the message for the family's own class."""
    content = dict(content)
    for name in _ACTIVATIONS:
        value = content.pop(BASE_PREFIX + name, None)
        if isinstance(content.get(name), list):  # the message, in any version's words
            content[name] = value
    types = config_class.attribute_map.get("layer_types", "layer_types")
    if types in config_class.__dataclass_fields__ and is_hybrid and content.get(types) is None:
        # A missing pattern must not be replaced by the family's default; an empty one is refused.
        content[types] = []
    return content


def _to_dict_of(model_type: str, parent: Any) -> Any:
    """`to_dict` of a family in a form that the family's own config class refuses."""

    @functools.wraps(parent.to_dict)
    def to_dict(self: Any) -> dict[str, Any]:
        content: dict[str, Any] = parent.to_dict(self)
        if takes_more_than_text(model_type):
            return content | {_TEXT: _refusing(content[_TEXT])}
        return _refusing(content)

    return to_dict


def _refusing(content: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in _ACTIVATIONS if name in content)
    return content | {BASE_PREFIX + name: content[name], name: list(_REFUSAL)}


def _part_class(base: Any) -> Any:
    """Config class of a hybrid's text decoder; its name leads transformers to the model class."""
    name = base.__name__
    if name not in globals():
        body = {"__module__": __name__, "__doc__": base.__doc__}
        globals()[name] = type(name, (HybridConfigMixin, base), body)
    return globals()[name]


@functools.cache
def hybrid_config_class(model_type: str) -> Any:
    """Config class of hybrids: the family's, with `hybrid_attention`."""
    base: Any = CONFIG_MAPPING[model_type]
    body = {
        "model_type": HYBRID_PREFIX + model_type,
        "hybrid_attention": None,
        "__annotations__": {"hybrid_attention": "dict | None"},
        "__module__": __name__,
        "to_dict": _to_dict_of(model_type, base),
        "save_pretrained": _save_of(model_type, base),
        "__doc__": f"{base.__name__} of a model with full and sliding heads.",
    }
    name = f"Hybrid{base.__name__}"
    created: Any = type(name, (HybridConfigMixin, base), body)
    created.__init__ = _init_of(model_type, created)
    globals()[name] = created
    return created


def __getattr__(name: str) -> Any:
    """A family's config class by its name, for unpickling in another process."""
    for model_type, base in CONFIG_MAPPING_NAMES.items():
        if name == f"Hybrid{base}":
            return hybrid_config_class(model_type)
        if name == base:
            return _part_class(CONFIG_MAPPING[model_type])
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
    content: dict[str, Any] = super(type(config), config).to_dict()
    for name in (
        "hybrid_attention", "model_type", "architectures", "auto_map",
        "_name_or_path", "transformers_version",
    ):  # fmt: skip
        content.pop(name, None)
    return content
