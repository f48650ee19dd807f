"""The order of KV heads in an attention module's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from bosch.hybrid import reorder_weight

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
