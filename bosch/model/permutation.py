"""Reorder the KV heads in a layer's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bosch.model.families import Family, decoder_layers


def reorder_weight(
    family: Family, name: str, weight: Tensor, order: Sequence[int], q_per_kv: int
) -> Tensor:
    """A weight of an attention module with its KV heads in `order`.

    `name` is the weight's name within the module: q_proj.weight, o_proj.weight, sinks. The rows of
    query, key and value projections and biases, the columns of the output projection, and
    parameters with an entry per head move with their heads. Other weights
    are returned unchanged, such as norms over one head's dimension, which all heads share.
    """
    module = name.partition(".")[0]
    if name == f"{family.output}.weight":
        return weight.index_select(1, _entries(order, weight.shape[1], weight))
    if module == family.fused and module not in family.per_head:
        key = weight.shape[0] // (q_per_kv + 2)
        projections = torch.split(weight, [q_per_kv * key, key, key])
        return torch.cat([x.index_select(0, _entries(order, len(x), x)) for x in projections])
    is_norm = module in ("q_norm", "k_norm") and family.norms_over_heads
    if module in ("q_proj", "k_proj", "v_proj") or is_norm or module in family.per_head:
        # Norms are [heads * D], or [heads, D] in some families.
        flat = weight.flatten() if is_norm else weight
        return flat.index_select(0, _entries(order, len(flat), weight)).view_as(weight)
    return weight


def reorder_heads(
    weights: Iterable[tuple[str, Tensor]],
    family: Family,
    orders: Sequence[Sequence[int]],
    config: Any,
) -> Iterator[tuple[str, Tensor]]:
    """`weights` by transformers' names, each layer's KV heads in the order of `orders[layer]`."""
    q_per_kv = config.num_attention_heads // decoder_layers(config).heads
    attention = re.compile(rf"(?:^|\.)layers\.(\d+)\.{family.attention}\.(.+)$")
    for name, weight in weights:
        match = attention.search(name)
        if match is not None:
            order = orders[int(match[1])]
            if list(order) != sorted(order):
                weight = reorder_weight(family, match[2], weight, order, q_per_kv)
        yield name, weight


def _entries(order: Sequence[int], count: int, weight: Tensor) -> Tensor:
    """Indices of `count` entries, an equal block for each KV head, with blocks in `order`."""
    size = count // len(order)
    blocks = torch.tensor(order, dtype=torch.long, device=weight.device)
    return (blocks[:, None] * size + torch.arange(size, device=weight.device)).reshape(-1)
