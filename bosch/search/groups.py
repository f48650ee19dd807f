"""Which layers are searched together; free of heavy imports, for `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def split_evenly(items: Sequence[Item], count: int) -> list[list[Item]]:
    """`items` in `count` consecutive parts of equal length; the first may have one item more."""
    size, longer = divmod(len(items), count)
    ends = [size * i + min(i, longer) for i in range(count + 1)]
    return [list(items[ends[i] : ends[i + 1]]) for i in range(count)]


def layer_groups(num_layers: int, layers_per_group: int) -> list[list[int]]:
    """Neighbouring layers in groups of at most `layers_per_group`, as equal as they can be."""
    return split_evenly(range(num_layers), -(-num_layers // layers_per_group))


def max_layers_per_group(num_heads: int, max_variables: int) -> int:
    """Most layers that are searched together: the largest power of two within `max_variables`.

    BOSCH B.2 groups at most four layers of 8 KV heads under its limit of 50 variables.
    """
    layers = max(1, max_variables // num_heads)
    return int(1 << (layers.bit_length() - 1))
