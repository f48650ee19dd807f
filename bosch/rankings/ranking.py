"""The head mask on budget from a ranking's scores (BOSCH B.3).

Shapes: L layers, HQ query heads, HKV key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.units import Units

Scores: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranked:
    """Full heads [L, HKV] on budget; `tied`: equal units on both sides of the budget, or 0."""

    is_full: npt.NDArray[np.bool_]
    tied: int


def rank_units(
    scores: Scores,
    num_key_value_heads: int,
    swa_ratio: float,
    most_local: Literal["largest", "smallest"],
    head_granularity: int = 1,
) -> Ranked:
    """Full heads, if the ceil(rho N) most local of N units slide; among equal ones, the first.

    The score of a KV head is the mean of `scores` [L, HQ] over its query heads; `most_local` says
    whether large or small scores mean local. With `head_granularity` g, units of g KV heads of
    similar score are ranked by their mean. Raises ValueError when g does not divide the KV heads of
    a layer, or `swa_ratio` (rho) is outside [0, 1].
    """
    head_scores = scores.reshape(len(scores), num_key_value_heads, -1).mean(axis=2)  # [L, HKV]
    head_scores = -head_scores if most_local == "largest" else head_scores
    units = Units.by_value(head_scores, head_granularity)
    unit_scores = units.gather(head_scores).mean(axis=2).reshape(-1)
    order = np.argsort(unit_scores, kind="stable")
    budget = swa_budget(unit_scores.size, swa_ratio)
    is_full = np.ones(unit_scores.size, dtype=np.bool_)
    is_full[order[:budget]] = False
    tied = 0
    if 0 < budget < unit_scores.size:
        border = unit_scores[order[budget]]
        if border == unit_scores[order[budget - 1]]:
            tied = int((unit_scores == border).sum())
    return Ranked(units.spread(is_full.reshape(units.shape)), tied)
