"""Turnover: heads that slide at a small ratio and not at a larger one (BOSCH §4.3, Table 3)."""

from __future__ import annotations

from dataclasses import dataclass

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
