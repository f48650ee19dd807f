"""Jaccard distance between the sliding heads of two methods (BOSCH §4.2, Figures 2 and 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bosch.heads import HeadMask


def jaccard_distance(first: HeadMask, second: HeadMask) -> float:
    """1 - |A n B| / |A u B| of the sets of sliding KV heads; 0 where both are empty (BOSCH §4.2).

    Raises ValueError when the masks are of models of different shape.
    """
    a, b = sliding_set(first), sliding_set(second)
    if first.is_full.shape != second.is_full.shape:
        raise ValueError(f"masks of shape {first.is_full.shape} and {second.is_full.shape}")
    union = int((a | b).sum())
    return 1.0 - int((a & b).sum()) / union if union else 0.0


def mean_distances(groups: Mapping[str, Sequence[HeadMask]]) -> npt.NDArray[np.float64]:
    """Mean Jaccard distance between the masks of each two groups, [G, G], in the mapping's order.

    A group holds one method's masks over seeds. The diagonal is the mean over pairs of different
    seeds: how much the method disagrees with itself (0 for a group of one mask).
    """
    lists = list(groups.values())
    distances = np.zeros((len(lists), len(lists)))
    for i, rows in enumerate(lists):
        for j in range(i, len(lists)):
            pairs = [
                jaccard_distance(a, b)
                for m, a in enumerate(rows)
                for n, b in enumerate(lists[j])
                if i != j or m < n
            ]
            distances[i, j] = distances[j, i] = float(np.mean(pairs)) if pairs else 0.0
    return distances


def sliding_set(mask: HeadMask) -> npt.NDArray[np.bool_]:
    """A of the paper as bits: True for a sliding KV head, [N]."""
    sliding: npt.NDArray[np.bool_] = ~mask.is_full.reshape(-1)
    return sliding
