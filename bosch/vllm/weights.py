"""Bring a checkpoint's heads into the order of the ranks that vLLM shares them among."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from bosch.model.families import Family, decoder_layers
from bosch.model.permutation import reorder_weight


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
