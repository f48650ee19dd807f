"""Layer rules: whole layers keep full attention, chosen by their place (BOSCH §3.4).

N - ceil(rho N) KV heads stay full: all heads of the first layers in the rule's order, and the first
heads of the next layer.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget

Bits: TypeAlias = npt.NDArray[np.bool_]  # [layers, heads], true for full heads


def rand(num_layers: int, num_heads: int, swa_ratio: float, seed: int) -> Bits:
    """RAND: full layers at random places."""
    order = np.random.default_rng(seed).permutation(num_layers).tolist()
    return _first_full(order, num_layers, num_heads, swa_ratio)


def bme(num_layers: int, num_heads: int, swa_ratio: float) -> Bits:
    """BME: full layers at the beginning, in the middle and at the end, in equal shares."""
    full_layers = _layers_touched(num_layers, num_heads, swa_ratio)
    begin = -(-full_layers // 3)
    end = -(-(full_layers - begin) // 2)
    middle_start = begin + (num_layers - full_layers) // 2
    middle_stop = middle_start + full_layers - begin - end
    blocks = [
        range(begin),
        range(num_layers - 1, num_layers - 1 - end, -1),
        range(middle_start, middle_stop),
    ]
    order = [layer for turn in zip_longest(*blocks) for layer in turn if layer is not None]
    return _first_full(order, num_layers, num_heads, swa_ratio)


def intr(num_layers: int, num_heads: int, swa_ratio: float) -> Bits:
    """INTR: full layers at even spacing, in the middle of equal stretches of layers."""
    full_layers = _layers_touched(num_layers, num_heads, swa_ratio)
    order = [(2 * i + 1) * num_layers // (2 * full_layers) for i in range(full_layers)]
    return _first_full(order, num_layers, num_heads, swa_ratio)


def _full_units(num_layers: int, num_heads: int, swa_ratio: float) -> int:
    return num_layers * num_heads - swa_budget(num_layers * num_heads, swa_ratio)


def _layers_touched(num_layers: int, num_heads: int, swa_ratio: float) -> int:
    """Layers with at least one full unit."""
    return -(-_full_units(num_layers, num_heads, swa_ratio) // num_heads)


def _first_full(order: list[int], num_layers: int, num_heads: int, swa_ratio: float) -> Bits:
    """Fill layers with full units in `order` until the budget is used up."""
    is_full = np.zeros((num_layers, num_heads), dtype=np.bool_)
    left = _full_units(num_layers, num_heads, swa_ratio)
    for layer in order:
        take = min(left, num_heads)
        is_full[layer, :take] = True
        left -= take
    return is_full
