"""BOSCH §2.2.2, Algorithm 2, corrected: how many units of each layer become sliding.

Two corrections: the drop is positive when the score falls (the published sign would localise the
hardest layers most), and the reconciliation ends when no bucket step fits, the rest being given
unit by unit, so that the budget is met exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.search.groups import split_evenly

_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class LayerRatios:
    """Result by layer: d (`drops`), w (`weights`, 1 is hardest) and sliding units (`quotas`)."""

    drops: list[float]
    weights: list[float]
    quotas: list[int]
    hardest_first: list[int]


def layer_drops(best: Sequence[float], original: float, scale: float) -> npt.NDArray[np.float64]:
    """d_l = drop_l - drop_{l+1}: what localising layer l cost on top of the layers above it."""
    drop = (original - np.asarray(best, dtype=np.float64)) / scale  # line 6, its sign corrected
    added: npt.NDArray[np.float64] = drop - np.append(drop[1:], 0.0)  # line 7
    return added


def layer_weights(drops: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """d clipped to its 2.5 and 97.5 percentiles and rescaled to w in [0, 1]; 0.5 if all equal."""
    low, high = np.percentile(drops, _PERCENTILES)  # line 8
    if high <= low:
        return np.full(len(drops), 0.5)
    clipped = np.clip(drops, low, high)  # line 10
    weights: npt.NDArray[np.float64] = (clipped - low) / (high - low)  # line 11
    return weights


def assign_ratios(
    drops: npt.NDArray[np.float64],
    num_heads: int,
    budget: int,
    buckets: Sequence[float],
    tie_drops: npt.NDArray[np.float64] | None = None,
) -> LayerRatios:
    """Sliding units per layer, `budget` in all (Algorithm 2).

    `drops` is d of `layer_drops`. Layers of equal weight are ordered by `tie_drops` (hardest is
    largest) where given, then by index. With `tie_drops`, layers that all have the same weight get
    the uniform ratio: no score says that one of them is harder. A bucket b stands for ceil(b H)
    units.
    """
    num_layers = len(drops)
    weights = layer_weights(drops)
    tie = np.zeros(num_layers) if tie_drops is None else tie_drops
    hardest_first = np.lexsort((np.arange(num_layers), -tie, -weights)).tolist()
    units = [swa_budget(num_heads, b) for b in buckets]
    if tie_drops is not None and np.ptp(weights) == 0:
        quotas = [budget // num_layers] * num_layers
    else:
        rank = [0] * num_layers
        for j, group in enumerate(split_evenly(hardest_first, len(buckets))):  # line 12
            for layer in group:
                rank[layer] = j  # line 13
        quotas = _step_buckets(rank, units, hardest_first, budget)
    quotas = _give_remainder(quotas, num_heads, hardest_first, budget)
    return LayerRatios(drops.tolist(), weights.tolist(), quotas, hardest_first)


def _step_buckets(
    ranks: list[int], units: list[int], hardest_first: list[int], target: int
) -> list[int]:
    """Move layers between neighbouring buckets while a step fits the gap (lines 17 to 33)."""
    rank = list(ranks)
    gap = target - sum(units[r] for r in rank)  # lines 14 and 15
    direction = 1 if gap > 0 else -1
    order = hardest_first[::-1] if gap > 0 else hardest_first  # line 16
    moved = True
    while gap != 0 and moved:
        moved = False
        for layer in order:
            neighbour = rank[layer] + direction
            if not 0 <= neighbour < len(units):
                continue
            step = units[neighbour] - units[rank[layer]]
            if abs(step) <= abs(gap):
                rank[layer] = neighbour
                gap -= step
                moved = True
            if gap == 0:
                break
    return [units[r] for r in rank]  # line 34


def _give_remainder(
    quotas: list[int], num_heads: int, hardest_first: list[int], target: int
) -> list[int]:
    """Give what no bucket step could to the easiest layers, or take it from the hardest ones."""
    quotas = list(quotas)
    gap = target - sum(quotas)
    direction = 1 if gap > 0 else -1
    order = hardest_first[::-1] if gap > 0 else hardest_first
    while gap != 0:
        for layer in order:
            if gap != 0 and 0 <= quotas[layer] + direction <= num_heads:
                quotas[layer] += direction
                gap -= direction
    return quotas
