"""From scores of query heads to a head mask on budget (BOSCH B.3): the same for every ranking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bosch.heads import HeadMask, swa_budget

Scores: TypeAlias = npt.NDArray[np.float64]
MostLocal = Literal["largest", "smallest"]


@dataclass(frozen=True)
class Ranked:
    """A mask on budget; `tied` counts the units whose score equals that of the last one chosen.

    `tied` is 0 where all of these are sliding: then no choice among equals was made.
    """

    mask: HeadMask
    tied: int


def group_means(scores: Scores, num_key_value_heads: int) -> Scores:
    """Mean over the query heads of each KV group: [L, HQ] to [L, HKV]."""
    means: Scores = scores.reshape(len(scores), num_key_value_heads, -1).mean(axis=2)
    return means


def rank_units(
    scores: Scores, num_key_value_heads: int, swa_ratio: float, most_local: MostLocal
) -> Ranked:
    """The ceil(rho N) most local KV groups become sliding; ties go to the lower index.

    `scores` [L, HQ] are of query heads; `most_local` says which end of them is local. Raises
    ValueError when a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("a head's score is not finite")
    units = group_means(scores, num_key_value_heads).reshape(-1)
    keys = -units if most_local == "largest" else units
    order = np.argsort(keys, kind="stable")
    budget = swa_budget(units.size, swa_ratio)
    is_full = np.ones(units.size, dtype=np.bool_)
    is_full[order[:budget]] = False
    tied = 0
    if 0 < budget < units.size and keys[order[budget]] == keys[order[budget - 1]]:
        tied = int((keys == keys[order[budget]]).sum())
    return Ranked(HeadMask(is_full.reshape(-1, num_key_value_heads)), tied)
