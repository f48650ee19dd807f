"""The order of KV heads in an attention module's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# For weights of a decoder layer, by names like "self_attn.o_proj.weight": an axis and sizes. Along
# the axis there are, for each size in turn, as many entries of every KV head: a fused projection
# of queries, keys and values has three sizes.
HeadWeights: TypeAlias = Mapping[str, tuple[int, Sequence[int]]]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def in_order(
    name: str, weight: Tensor, head_weights: HeadWeights, orders: Mapping[int, Sequence[int]]
) -> Tensor:
    """The weight `name` of a decoder, in a layer of `orders` with KV heads in this order.

    Other weights are returned unchanged, such as norms over one head's dimension.
    """
    place = _LAYER.search(name)
    order = orders.get(int(place[1]), ()) if place is not None else ()
    if place is None or place[2] not in head_weights or list(order) == sorted(order):
        return weight
    return reorder_weight(weight, *head_weights[place[2]], order)


def reorder_weight(weight: Tensor, axis: int, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """A weight with its KV heads in `order` (BOSCH B.2)."""
    heads = torch.tensor(order, device=weight.device)[:, None]
    parts: list[Any] = []
    for part, size in zip(
        torch.split(weight, [size * len(order) for size in sizes], axis), sizes, strict=True
    ):
        entries = heads * size + torch.arange(size, device=weight.device)
        parts.append(part.index_select(axis, entries.flatten()))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]
