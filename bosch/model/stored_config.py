"""A config.json as it is on disk: a decoder's layers and sizes, without transformers or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from bosch.errors import UserError
from bosch.model.decoder_shape import DecoderShape
from bosch.model.families import (
    EXPERTS_PER_TOKEN,
    FAMILIES,
    HYBRID_PREFIX,
    SLIDING,
    DecoderLayers,
    Family,
    decoder_layers,
    family_of,
    text_config,
)

_FULL = "full_attention"
_LISTED = ("layer_types", "layers_block_type")
_PATTERN = {"M": "linear_attention", "*": _FULL, "-": "mlp", "E": "moe"}
# One thing by the names that families give it.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_SHARED_EXPERTS = ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts")
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads")
_MAMBA_HEAD_DIM = ("mamba_d_head", "mamba_head_dim")
_MAMBA_STATE = ("mamba_d_state", "ssm_state_size")
_MAMBA_GROUPS = ("mamba_n_groups", "n_groups")
_MOST_LAYERS = 10_000


@contextmanager
def _wrong_types() -> Iterator[None]:
    """Say what in config.json has a wrong type, in one sentence."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.path: config.json holds a value of a wrong type ({reason})"
        ) from None


@dataclass(frozen=True)
class StoredConfig:
    """A config.json's content, with the values of its text decoder beside its own.

    Every reader raises UserError, in one sentence, where a value is missing or of a wrong type.
    """

    config: Mapping[str, Any]

    @classmethod
    def of_loaded(cls, config: Any) -> StoredConfig:
        """The sizes of a model that is loaded, from its transformers configuration."""
        return cls(merged_text(config.to_dict()))

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer, `default` where it is missing."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
            raise UserError(
                f"model.path: config.json has {name} = {value!r:.60}; expected a positive integer"
            )
        return value

    @property
    def layers(self) -> int:
        with _wrong_types():
            listed = _listed_types(self.config)
        layers = self.number("num_hidden_layers", len(listed) if listed else None)
        if layers > _MOST_LAYERS:
            raise UserError(f"model.path: config.json has {layers:,} layers; that is no model")
        return layers

    @property
    def kinds(self) -> DecoderLayers:
        """What each decoder layer is."""
        layers = self.layers
        with _wrong_types():
            return decoder_layers(_as_loaded(self.config, layers))

    def check_family(self) -> None:
        """Raise UserError when the model is known to be none that can be made hybrid."""
        layers = self.layers
        with _wrong_types():
            family_of(_as_loaded(self.config, layers))

    @property
    def plain_logits(self) -> bool:
        """Whether attention takes no more than scaled scores: no caps, no extra logit per head."""
        text = text_config(_as_loaded(self.config, self.layers))
        family = FAMILIES.get(str(text.model_type))
        if family is None:
            return True
        # The families that cap scores do so where config.json does not say.
        capped = getattr(text, "attn_logit_softcapping", family.caps_scores or None) is not None
        return not capped and "sinks" not in family.per_head

    def check_heads(self) -> None:
        """Raise UserError when query heads do not share KV heads evenly."""
        if self.attention_heads % self.key_value_heads:
            raise UserError(
                f"model.path: config.json has {self.attention_heads} attention heads, "
                f"no multiple of its {self.key_value_heads} KV heads"
            )

    @property
    def max_positions(self) -> int | None:
        name = "max_position_embeddings"
        return None if self.config.get(name) is None else self.number(name)

    @property
    def attention_heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def key_value_heads(self) -> int:
        """KV heads of a layer with full attention."""
        self.number("num_key_value_heads", self.attention_heads)
        return self.kinds.heads

    @property
    def hidden_size(self) -> int:
        return self.number("hidden_size")

    @property
    def head_dim(self) -> int:
        """Head dimension of a layer with full attention."""
        self.number("head_dim", self.hidden_size // self.attention_heads)
        return self.kinds.head_dim

    @property
    def decoder(self) -> DecoderShape:
        """Sizes that memory and operations follow from; biases and extra norms are left out."""
        with _wrong_types():
            return self._decoder()

    def _decoder(self) -> DecoderShape:
        text = text_config(_as_loaded(self.config, self.layers))
        family = FAMILIES.get(str(text.model_type).removeprefix(HYBRID_PREFIX))
        width = self._dense_width()
        experts = self._first(_EXPERTS)
        expert_width = self.number("moe_intermediate_size", width) if experts else width
        shared = self._first(_SHARED_WIDTH)
        if family is not None and family.experts_like_mlp is not None:
            expert_width, shared = width, family.experts_like_mlp * width
        shared = shared or self._first(_SHARED_EXPERTS) * expert_width
        if not experts:  # an MLP alone, by the name of what experts share in some families
            width, expert_width, shared = shared or width, shared or width, 0
        kinds = self.kinds
        shape = DecoderShape(
            layers=self.layers,
            hidden=self.hidden_size,
            attention_heads=self.attention_heads,
            key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            intermediate=expert_width,
            vocabulary=self.number("vocab_size"),
            experts=experts,
            experts_per_token=(self._first(EXPERTS_PER_TOKEN) or 1) if experts else 0,
            tied=bool(self.config.get("tie_word_embeddings")),
            kinds=kinds,
            gate=self._gate(family),
            state_layer=self._state_layer(),
            maps=family.mlp_maps if family is not None else 3,
            shared=shared,
            dense=width,
            values_are_keys=bool(self.config.get("attention_k_eq_v")),
            positions=self._positions(family),
            layer_inputs=self._first(("hidden_size_per_layer_input",)),
            layer_vocabulary=self._first(("vocab_size_per_layer_input",)),
        )
        dense_layers = self._dense_layers(shape.feed_forward_layers) if experts else 0
        if experts and dense_layers == shape.feed_forward_layers:
            return replace(shape, experts=0, experts_per_token=0, shared=0, intermediate=width)
        return replace(shape, dense_layers=dense_layers)

    def _first(self, names: Sequence[str]) -> int:
        """The number by the first of its names in config.json, of layers the largest; else 0."""
        for name in names:
            value = self.config.get(name)
            if value:
                most = max(value) if isinstance(value, list) else value
                return StoredConfig({name: most}).number(name)
        return 0

    def _dense_width(self) -> int:
        """Width of an MLP."""
        default = self.number("intermediate_size", 4 * self.hidden_size)
        width = self._first(("ffn_dim",)) or default
        if self.config.get("block_auto_adjust_ff_dim"):  # LFM2
            width = int(2 * width / 3)
            factor = self.config.get("block_ffn_dim_multiplier")
            if factor is not None:
                multiple = self.number("block_multiple_of", 256)
                width = -(-int(factor * width) // multiple) * multiple
        return width

    def _dense_layers(self, feed_forward_layers: int) -> int:
        """Layers of a mixture of experts that have an MLP in the experts' place."""
        types, listed = self.config.get("mlp_layer_types"), _listed_types(self.config) or []
        if types is not None:
            return list(types).count("dense")
        if {"mlp", "moe"}.intersection(listed):
            return feed_forward_layers - listed.count("moe")
        first = self._first(("first_k_dense_replace", "num_dense_layers"))
        if first:
            return min(first, self.layers)
        layers, dense = range(self.layers), set(self.config.get("mlp_only_layers") or ())
        if period := self._first(("expert_layer_period",)):
            offset = self.config.get("expert_layer_offset") or 0
            dense |= {n for n in layers if n % period != offset}
        if (start := self.config.get("moe_layer_start_index")) is not None:
            end = self.config.get("moe_layer_end_index")
            last = self.layers - 1 if end in (None, -1) else end
            dense |= {n for n in layers if not start <= n <= last}
        step = self._first(("decoder_sparse_step", "moe_layer_interval")) or 1
        return len(dense.intersection(layers) | {n for n in layers if (n + 1) % step})

    def _gate(self, family: Family | None) -> int:
        """Width of the gates of a layer's attention."""
        if family is None or not family.gated or self.config.get("use_attention_gate") is False:
            return 0
        if family.gate_per_head and self.config.get("gating") in (None, True, "per-head"):
            return self.attention_heads
        return self.attention_heads * self.head_dim

    def _positions(self, family: Family | None) -> int:
        """Rows of a table of positions that is learned."""
        if family is None or family.learned_positions is None:
            return 0
        return (self.max_positions or 0) + family.learned_positions

    def _state_layer(self) -> int:
        """Parameters of one layer of linear attention, by the names of the known kinds; else 0."""
        hidden = self.hidden_size
        if "linear_num_value_heads" in self.config:  # gated delta net
            heads = self.number("linear_num_value_heads")
            keys = self.number("linear_num_key_heads") * self.number("linear_key_head_dim")
            values = heads * self.number("linear_value_head_dim")
            return hidden * (2 * keys + 3 * values + 2 * heads)
        heads = next((self.number(key) for key in _MAMBA_HEADS if self.config.get(key)), 0)
        if heads:  # Mamba 2
            inner = self.number("mamba_d_ssm", 0) or heads * next(
                (self.number(k) for k in _MAMBA_HEAD_DIM if type(self.config.get(k)) is int),
                self.number("mamba_expand", 2) * hidden // heads,
            )
            state = next((self.number(key) for key in _MAMBA_STATE if self.config.get(key)), 1)
            groups = next((self.number(key) for key in _MAMBA_GROUPS if self.config.get(key)), 1)
            return hidden * (3 * inner + 2 * groups * state + heads)
        if "mamba_d_state" in self.config:  # Mamba 1
            inner = self.number("mamba_expand", 2) * hidden
            return 3 * inner * hidden + 2 * inner * self.number("mamba_d_state")
        return 4 * hidden * hidden


def merged_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the values of its text decoder, where it has one."""
    text = config.get("text_config")
    own = dict(text) if isinstance(text, dict) else {}
    outer = ("model_type", "tie_word_embeddings")  # where the head is
    return {**config, **own, **{name: config[name] for name in outer if name in config}}


def _as_loaded(content: Mapping[str, Any], num_layers: int) -> Any:
    """config.json's `content` as `bosch.model.families` reads a config, without transformers.

    What its config class would fill in counts as absent, but for the kinds of the layers where the
    family alone says them. So that a model slides by itself may show only when it is loaded, and
    no other model is taken for one that does.
    """
    text = SimpleNamespace(**{"model_type": "", **content})
    own = content.get("text_config")
    if isinstance(own, Mapping):
        text.model_type = own.get("model_type") or f"{content['model_type']}_text"
        del text.text_config
    types = _stored_types(content, str(text.model_type), num_layers)
    if types is None:
        # Whether the window is switched off by another option is not known here.
        text.sliding_window = None
    else:
        text.layer_types = types
    text.num_hidden_layers = num_layers
    stored = content.get("per_layer_config") or {}
    overrides = {int(layer): sizes for layer, sizes in stored.items()}  # keys like "05"
    if not overrides and content.get("global_head_dim"):
        sizes = {"head_dim": content["global_head_dim"]}
        if content.get("attention_k_eq_v", True) and content.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = content["num_global_key_value_heads"]
        overrides = {n: sizes for n, kind in enumerate(types or []) if kind == _FULL}
    if overrides:
        text.is_heterogeneous = True
        text.per_layer_config = [
            SimpleNamespace(**vars(text) | overrides.get(n, {})) for n in range(num_layers)
        ]
    if not isinstance(own, Mapping):
        return text
    return SimpleNamespace(model_type=content["model_type"], text_config=text)


def _listed_types(content: Mapping[str, Any]) -> list[str] | None:
    """The kinds of the layers where config.json lists them; a TypeError where that is no list."""
    for name in _LISTED:
        listed = content.get(name)
        if listed is not None:
            if not isinstance(listed, list):
                raise TypeError(f"{name} is {listed!r:.60}, expected a list")
            return list(listed)
    pattern = content.get("hybrid_override_pattern")
    return None if pattern is None else [_PATTERN.get(letter, letter) for letter in pattern]


def _stored_types(content: Mapping[str, Any], model_type: str, num_layers: int) -> list[str] | None:
    """The kinds of the layers as far as config.json or the family say; None where they do not."""
    listed = _listed_types(content)
    if listed is not None:
        return listed
    layers = range(num_layers)
    for name, other in (("attn_layer_indices", "linear_attention"), ("full_attn_idxs", "conv")):
        if name in content:
            chosen = content[name] or ()
            return [_FULL if layer in chosen else other for layer in layers]
    if period := content.get("attn_layer_period"):
        offset = content.get("attn_layer_offset", 0)
        return [_FULL if n % period == offset else "linear_attention" for n in layers]
    family = FAMILIES.get(model_type.removeprefix(HYBRID_PREFIX))
    if family is not None and family.beside_states:
        return ["hybrid"] * num_layers
    kind = SLIDING
    every = None if family is None else family.full_every
    if family is not None and family.linear_every:
        kind, every = "linear_attention", content.get("full_attention_interval")
        every = every or family.linear_every
    elif content.get("sliding_window") is None:
        return [_FULL] * num_layers
    pattern = content.get("sliding_window_pattern")
    if every and type(pattern) is int:
        every = pattern
    if every is None:
        return None
    return [kind if not every or n % every else _FULL for n in range(1, num_layers + 1)]
