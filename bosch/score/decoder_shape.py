"""A decoder's sizes and operations, from transformers' model on the meta device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from bosch.errors import UserError
from bosch.model import families
from bosch.model.configuration import is_hybrid
from bosch.model.interface import attention_module
from bosch.model.loading import auto_class, full_attention_config
from bosch.model.stored_config import StoredConfig
from bosch.score.flops import Flops, linear_flops
from bosch.window import Window


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a text decoder with its output head, in parameters unless stated otherwise.

    `active_parameters` are those that a token is multiplied with: only its experts, no embedding
    tables. `layer_parameters` and `active_width` belong to the largest layer; the width of a
    feed-forward block without a gate counts two thirds, since it has two maps instead of three.
    `tables` are those outside the layers.
    """

    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    kinds: families.DecoderLayers
    query_size: int  # width of all query heads together
    own_query_size: int  # the same in a layer that slides in the base model
    experts: int
    experts_per_token: int
    active_width: int
    parameters: int
    active_parameters: int
    layer_parameters: int
    tables: int
    softcap: bool = False  # of attention scores, which fused kernels do not support

    @staticmethod
    def of(config: PreTrainedConfig) -> DecoderShape:
        """Sizes of a transformers configuration (a hybrid's base); UserError if not buildable."""
        content = config.to_json_string(use_diff=False)
        return _shape_of(_Content(type(config), content, config))

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> DecoderShape:
        """Sizes of a model on the meta device."""
        text, kinds = families.text_config(model.config), families.decoder_layers(model.config)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        flops = Flops(model)
        weights = {id(p): p for part in (decoder, head) for p in part.parameters()}
        total = sum(weight.numel() for weight in weights.values())
        layers = [_count(layer.parameters()) for layer in decoder.layers]
        experts = [
            weight
            for module in decoder.layers.modules()
            for weight in module.parameters(recurse=False)
            if weight.ndim == 3 and not isinstance(module, nn.Conv1d)
        ]
        number_of_experts = max((weight.shape[0] for weight in experts), default=0)
        heads = text.num_attention_heads
        return cls(
            layers=len(layers),
            hidden=text.hidden_size,
            vocabulary=head.weight.shape[0],
            tied=head.weight is model.get_input_embeddings().weight,
            kinds=kinds,
            query_size=heads * kinds.head_dim,
            own_query_size=heads * kinds.own_head_dim,
            experts=number_of_experts,
            experts_per_token=families.experts_per_token(text) if experts else 0,
            active_width=_active_width(model, kinds.full, number_of_experts),
            parameters=total,
            active_parameters=(flops.all_linear + flops.output_head) // 2,
            layer_parameters=max(layers),
            tables=total - sum(layers),
            softcap="softcap" in families.attention_needs(model.config),
        )

    @property
    def full_layers(self) -> int:
        """Layers with full attention: the rows of a head mask."""
        return len(self.kinds.full)

    @property
    def key_value_heads(self) -> int:
        """KV heads of a layer with full attention."""
        return self.kinds.heads

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kinds.heads * self.kinds.head_dim

    @property
    def table(self) -> int:
        """Parameters of the output head; a separate input table has as many."""
        return self.vocabulary * self.hidden

    def forward_flops(
        self,
        tokens: float,
        length: int,
        shares: Mapping[Window, float] | None = None,
        logits: float | None = None,
    ) -> float:
        """Operations of a forward pass over `tokens` in sequences of `length`.

        A query of a full head costs the keys before it, one of a sliding head its W keys; `shares`
        has those of heads by window. The output head is computed at `logits` tokens, by default at
        all. Multiplication and addition count as two operations; recurrences are not counted.
        """
        full = keys = (length + 1) / 2
        for window, share in (shares or {}).items():
            keys += share * (_visible_keys(window.max_keys, length) - full)
        attention = self.full_layers * self.query_size * keys
        for own_window in self.kinds.windows.values():
            attention += self.own_query_size * _visible_keys(own_window, length)
        without_logits = 0.0 if logits is None else tokens - logits
        operations = tokens * (2 * self.active_parameters + 4 * attention)
        return operations - 2 * self.table * without_logits

    def training_flops(
        self, tokens: float, length: int, shares: Mapping[Window, float] | None = None
    ) -> float:
        """Operations of forward and backward without recomputation, as counted by MFU."""
        return 3 * self.forward_flops(tokens, length, shares)


@dataclass(frozen=True)
class _Content:
    """A configuration, equal to others of the same class and fields."""

    type: type
    json: str
    config: PreTrainedConfig = field(compare=False)


@functools.lru_cache(maxsize=4)
def _shape_of(content: _Content) -> DecoderShape:
    """Built once for all stages of a plan."""
    return DecoderShape.of_model(_empty_model(content.config))


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration (for a hybrid, of its base) on the meta device."""
    if is_hybrid(config):
        config = full_attention_config(config)
    elif type(config) is not CONFIG_MAPPING[config.model_type]:  # the model has its own code
        config = StoredConfig(config.to_dict()).of_transformers()
    try:
        with torch.device("meta"):
            # A copy, since from_config writes the attention into the configuration.
            model = auto_class(config).from_config(
                copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
            )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            "model.path: transformers cannot build the model that config.json describes "
            f"({type(error).__name__}: {reason:.200})"
        ) from error
    model.tie_weights()
    return model


def _active_width(model: PreTrainedModel, full: Iterable[int], experts: int) -> int:
    """Intermediate width that a token passes through, summed over its experts."""
    text = families.text_config(model.config)
    widest = 0
    for number in full:
        layer = model.get_decoder().layers[number]
        inside = {id(module) for module in attention_module(model, number).modules()}
        flops = sum(linear_flops(m, text) for m in layer.modules() if id(m) not in inside)
        routers = sum(
            weight.numel()
            for weight in layer.parameters()
            if experts and weight.shape == (experts, text.hidden_size)
        )
        widest = max(widest, (flops // 2 - routers) // (3 * text.hidden_size))
    return widest


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _visible_keys(limit: int, length: int) -> float:
    """Mean number of keys of a query that sees at most `limit`."""
    keys = min(limit, length)
    return keys * (2 * length - keys + 1) / (2 * length)
