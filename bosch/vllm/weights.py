"""Bring a checkpoint into the form that vLLM reads, while it is loaded: its names, its heads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bosch.model.families import Family, decoder_layers
from bosch.model.permutation import reorder_weight


def published_names(
    weights: Iterable[tuple[str, Tensor]], family: Family, config: Any
) -> Iterator[tuple[str, Tensor]]:
    """`weights` under the names of the family's published checkpoints, which vLLM's classes read.

    A hybrid model is saved under transformers' names of its parameters. These differ where
    transformers renames modules or joins experts while it loads; other weights pass as they are.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    mapping_of: Any = get_checkpoint_conversion_mapping
    conversions = mapping_of(family.model_type)
    if conversions is None:
        yield from weights
        return
    model: Any = SimpleNamespace(_weight_conversions=conversions, config=config)
    for name, weight in weights:
        yield from revert_weight_conversion(model, {name: weight}).items()


def reorder_heads(
    weights: Iterable[tuple[str, Tensor]],
    family: Family,
    orders: Sequence[Sequence[int]],
    config: Any,
) -> Iterator[tuple[str, Tensor]]:
    """`weights` of a checkpoint with each layer's heads in order; names are transformers' own.

    `orders[layer]` lists the layer's KV heads in their new order.
    """
    q_per_kv = config.num_attention_heads // decoder_layers(config).heads
    attention = re.compile(rf"(?:^|\.)layers\.(\d+)\.{family.attention}\.(.+)$")
    for name, weight in weights:
        match = attention.search(name)
        if match is not None:
            order = orders[int(match[1])]
            if list(order) != sorted(order):
                weight = reorder_weight(family, match[2], weight, order, q_per_kv)
        yield name, weight
