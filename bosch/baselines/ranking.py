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
    """The ceil(rho N) most local KV groups become sliding; ties go to the lower index.

    `scores` [L, HQ] are of query heads; `most_local` says which end of them is local. With
    `head_granularity` g, units of g KV groups of similar score are ranked by their mean. Raises
    ValueError when a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("a head's score is not finite")
    heads = scores.reshape(len(scores), num_key_value_heads, -1).mean(axis=2)  # [L, HKV]
    heads = -heads if most_local == "largest" else heads
    units = Units.by_value(heads, head_granularity)
    keys = units.of_heads(heads).mean(axis=2).reshape(-1)
    order = np.argsort(keys, kind="stable")
    budget = swa_budget(keys.size, swa_ratio)
    is_full = np.ones(keys.size, dtype=np.bool_)
    is_full[order[:budget]] = False
    tied = 0
    if 0 < budget < keys.size and keys[order[budget]] == keys[order[budget - 1]]:
        tied = int((keys == keys[order[budget]]).sum())
    return Ranked(units.head_mask(HeadMask(is_full.reshape(units.shape))), tied)
