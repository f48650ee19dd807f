"""Swap test: what it costs to exchange the heads that turned over (BOSCH C.1, Tables 5, 19, 20)."""

from __future__ import annotations

import numpy as np

from bosch.analysis.jaccard import sliding_set
from bosch.heads import HeadMask


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
