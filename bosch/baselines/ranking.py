"""From scores of query heads to a head mask on budget (BOSCH B.3): the same for every ranking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.units import Units

Scores: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranked:
    """A mask on budget; `tied` counts the units whose score equals that of the last one chosen.

    `tied` is 0 where all of these are sliding: then no choice among equals was made.
    """

    mask: HeadMask
    tied: int


def rank_units(
    scores: Scores,
    num_key_value_heads: int,
    swa_ratio: float,
    most_local: Literal["largest", "smallest"],
    head_granularity: int = 1,
) -> Ranked:
    """The most local units of KV heads become sliding, ceil(rho x units); ties: the lower unit.

    `scores` [L, HQ] are of query heads; `most_local` says whether a large or a small score means
    local. With `head_granularity` g, units of g KV heads of similar score are ranked by their mean.
    Raises ValueError when g does not divide the KV heads of a layer.
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
    return Ranked(units.head_mask(HeadMask(is_full.reshape(units.shape))), tied)
