"""Turnover, heads that slide at a small ratio and not at a larger one, and the swap test of it.

BOSCH §4.3 and Table 3; the swap test, what it costs to exchange those heads, is that of C.1 and
Tables 5, 19 and 20.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bosch.analysis.jaccard import sliding_set
from bosch.heads import HeadMask


@dataclass(frozen=True)
class Turnover:
    """T, T_max and T~ = T / T_max between the sliding sets of two ratios, as shares."""

    raw: float
    most: float

    @property
    def normalised(self) -> float:
        """T~; 0 where the larger set holds every head, so that no turnover is possible."""
        return self.raw / self.most if self.most > 0.0 else 0.0


def turnover(small: HeadMask, large: HeadMask) -> Turnover:
    """T = |A_s \\ A_l| / |A_s| and its maximum for sets of these sizes (BOSCH §4.3).

    Of A_s at most min(|A_s|, N - |A_l|) heads can be outside A_l. Between 0.75 and 0.875 T_max is
    1/6, as the paper's Table 3 implies.

    Raises ValueError when the masks differ in shape, A_s is empty, or A_l is the smaller set.
    """
    if small.is_full.shape != large.is_full.shape:
        raise ValueError(f"masks of shape {small.is_full.shape} and {large.is_full.shape}")
    a, b = sliding_set(small), sliding_set(large)
    size_small, size_large = int(a.sum()), int(b.sum())
    if size_small == 0:
        raise ValueError("the mask of the smaller ratio has no sliding head")
    if size_small > size_large:
        raise ValueError(
            f"the smaller ratio has {size_small} sliding heads, the larger {size_large}"
        )
    return Turnover(
        raw=int((a & ~b).sum()) / size_small,
        most=min(size_small, a.size - size_large) / size_small,
    )


def swapped(small: HeadMask, large: HeadMask, seed: int) -> HeadMask:
    """A'_l: random members of A_l make room for all of A_s \\ A_l (BOSCH C.1).

    As many leave as enter, so A'_l is on the budget of `large`; it is `large` itself when nothing
    turned over. The same seed gives the same mask. Raises ValueError when the masks differ in
    shape or A_l is the smaller set.
    """
    if small.is_full.shape != large.is_full.shape:
        raise ValueError(f"masks of shape {small.is_full.shape} and {large.is_full.shape}")
    a, b = sliding_set(small), sliding_set(large)
    if a.sum() > b.sum():
        raise ValueError("the mask of the smaller ratio has more sliding heads")
    entering = np.flatnonzero(a & ~b)
    members = np.flatnonzero(b)
    leaving = np.random.default_rng(seed).choice(members, len(entering), replace=False)
    result = b.copy()
    result[entering], result[leaving] = True, False
    return HeadMask(~result.reshape(large.is_full.shape))
