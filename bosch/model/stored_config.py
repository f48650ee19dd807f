"""Fields of a model's config.json: sizes from the file, others as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from bosch.errors import UserError
from bosch.model import families

_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
# Fields of config.json with which layers or their heads may differ.
_DIFFERENCES = ("per_layer_config", "global_head_dim", "attn_logit_softcapping", "text_config")
# Families that cap attention scores also if the file does not say so.
_CAPPED = ("gemma2", "vaultgemma")


@dataclass(frozen=True, eq=False)
class StoredConfig:
    """The content of a config.json; methods raise UserError for a missing or mistyped value."""

    content: Mapping[str, Any]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content, merged with the fields of its text decoder if it has one."""
        text = self.content.get("text_config")
        fields = text.items() if type(text) is dict else ()
        return {**self.content, **{k: v for k, v in fields if k != "model_type"}}

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` if it is missing."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
            raise UserError(f"config.json has {name} = {value!r:.60}; expected a positive integer")
        return value

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        listed = self.config.get("layers_block_type") or self.config.get("hybrid_override_pattern")
        count = len(listed) if isinstance(listed, list | str) else None
        return self.number("num_hidden_layers", count)

    @property
    def attention_heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def hidden_size(self) -> int:
        return self.number("hidden_size")

    @property
    def max_positions(self) -> int | None:
        name = "max_position_embeddings"
        stated = None if self.config.get(name) is None else self.number(name)
        rope = families.rope_of(self.config)
        return families.scaled_positions(self._model_type, stated, rope)

    def check_sizes(self) -> None:
        """Raise UserError for a size of a wrong type, or heads that do not divide evenly."""
        heads = self.attention_heads
        self.number("head_dim", self.hidden_size // heads)
        self.number("vocab_size", 1)
        kv_heads = self.number("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserError(
                f"config.json has {heads} attention heads, no multiple of its {kv_heads} KV heads"
            )

    @cached_property
    def loaded(self) -> Any:
        """The configuration as transformers loads it.

        Importing transformers takes seconds, so it is avoided if config.json itself shows that all
        layers have full attention with the same heads.
        """
        if self._is_plain:
            return SimpleNamespace(**{**self.content, "model_type": self._model_type})
        return self.of_transformers()

    def of_transformers(self) -> Any:
        """transformers' configuration; for a hybrid that of its base model."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        content = {**self.content, "model_type": self._model_type}
        content.pop("hybrid_attention", None)
        try:
            config = CONFIG_MAPPING[self._model_type].from_dict(
                json.loads(json.dumps(content), object_hook=_decoded_float)
            )
        except Exception as error:  # each configuration class raises its own errors
            reason = " ".join(str(error).split())
            raise UserError(
                f"transformers cannot read config.json as one of type "
                f"'{self._model_type}' ({type(error).__name__}: {reason:.200})"
            ) from error
        families.drop_idle_window(config)
        return config

    @property
    def _model_type(self) -> str:
        return str(self.content.get("model_type")).removeprefix(families.HYBRID_PREFIX)

    @property
    def _is_plain(self) -> bool:
        """Whether the file itself shows full attention with the same heads in all layers."""
        types = self.content.get("layer_types")
        return (
            isinstance(types, list)
            and self._model_type not in _CAPPED
            and types == [families.FULL_ATTENTION] * self.layers
            and all(isinstance(self.content.get(name), int) for name in _HEADS)
            and not any(name in self.content for name in _DIFFERENCES)
        )

    @property
    def kinds(self) -> families.DecoderLayers:
        """The kinds of the decoder layers."""
        with _wrong_types():
            return families.decoder_layers(self.loaded)

    def check_family(self) -> None:
        """Raise UserError when the model cannot be made hybrid."""
        with _wrong_types():
            families.check_family(self.loaded)

    @property
    def attention_needs(self) -> dict[str, str]:
        """As `bosch.model.families.attention_needs`."""
        return families.attention_needs(self.loaded)


def _decoded_float(value: dict[str, Any]) -> Any:
    """The number for {"__float__": "Infinity"}, transformers' form of floats; else `value`."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@contextmanager
def _wrong_types() -> Iterator[None]:
    """Turn errors inside the block into a UserError about a wrong type in config.json."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"config.json holds a value of a wrong type ({reason})") from None
