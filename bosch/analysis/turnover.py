"""How masks differ: turnover between ratios, its swap test, Jaccard distances between methods.

Turnover (BOSCH §4.3, Table 3) is the share of the heads that slide at a small ratio and are full at
a larger one. The swap test (C.1, Tables 5, 19 and 20) measures the loss from exchanging them.
Jaccard distances are those of §4.2, Figures 2 and 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.heads import HeadMask


@dataclass(frozen=True)
class Turnover:
    """T, T_max and T~ = T / T_max between the sliding sets of two ratios, as shares."""

    share: float
    maximum: float

    @property
    def normalised(self) -> float:
        """T~; 0 where all heads slide at the larger ratio, so that T_max is 0."""
        return self.share / self.maximum if self.maximum > 0.0 else 0.0


def turnover(small: HeadMask, large: HeadMask) -> Turnover:
    """T = |A_s \\ A_l| / |A_s| and its maximum for sets of these sizes (BOSCH §4.3).

    Of A_s at most min(|A_s|, N - |A_l|) heads can be outside A_l. Between 0.75 and 0.875 T_max is
    1/6, as the paper's Table 3 implies.

    Raises ValueError when the masks differ in shape, A_s is empty, or A_l is the smaller set.
    """
    a, b = _sliding_sets(small, large)
    size_small, size_large = int(a.sum()), int(b.sum())
    if size_small == 0:
        raise ValueError("the mask of the smaller ratio has no sliding head")
    if size_small > size_large:
        raise ValueError(
            f"the smaller ratio has {size_small} sliding heads, the larger {size_large}"
        )
    return Turnover(
        share=int((a & ~b).sum()) / size_small,
        maximum=min(size_small, a.size - size_large) / size_small,
    )


def swapped(small: HeadMask, large: HeadMask, seed: int) -> HeadMask:
    """A'_l: random members of A_l make room for all of A_s \\ A_l (BOSCH C.1).

    A'_l has as many sliding heads as `large`, and is `large` itself without turnover. The same seed
    gives the same mask. Raises ValueError when the masks differ in shape or A_l is the smaller set.
    """
    a, b = _sliding_sets(small, large)
    if a.sum() > b.sum():
        raise ValueError("the mask of the smaller ratio has more sliding heads")
    entering = np.flatnonzero(a & ~b)
    members = np.flatnonzero(b)
    leaving = np.random.default_rng(seed).choice(members, len(entering), replace=False)
    result = b.copy()
    result[entering], result[leaving] = True, False
    return HeadMask(~result.reshape(large.is_full.shape))


def jaccard_distance(first: HeadMask, second: HeadMask) -> float:
    """1 - |A ∩ B| / |A ∪ B| of the sets of sliding KV heads; 0 where both are empty (BOSCH §4.2).

    Raises ValueError when the masks are of models of different shape.
    """
    a, b = _sliding_sets(first, second)
    union = int((a | b).sum())
    return 1.0 - int((a & b).sum()) / union if union else 0.0


def mean_distances(groups: Mapping[str, Sequence[HeadMask]]) -> npt.NDArray[np.float64]:
    """Mean Jaccard distance between the masks of each pair of groups, [G, G], in the given order.

    A group holds one method's masks over seeds. The diagonal is the mean over pairs of different
    seeds (0 for a single mask). Raises ValueError for an empty group.
    """
    lists = list(groups.values())
    if not all(lists):
        raise ValueError("a group has no mask")
    distances = np.zeros((len(lists), len(lists)))
    for i, rows in enumerate(lists):
        for j in range(i, len(lists)):
            pairs = itertools.combinations(rows, 2) if i == j else itertools.product(rows, lists[j])
            values = [jaccard_distance(a, b) for a, b in pairs]
            distances[i, j] = distances[j, i] = float(np.mean(values)) if values else 0.0
    return distances


def _sliding_sets(
    first: HeadMask, second: HeadMask
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Sliding KV heads as booleans, [N] each; ValueError for other shapes or several windows."""
    if max(first.num_windows, second.num_windows) > 1:
        raise ValueError("a mask has several windows")
    if first.is_full.shape != second.is_full.shape:
        raise ValueError(f"masks of shape {first.is_full.shape} and {second.is_full.shape}")
    return ~first.is_full.reshape(-1), ~second.is_full.reshape(-1)
