"""Optimality gap: how far a mask is from the best mask on budget, with all masks measured.

It needs a model that is small enough to evaluate all C(N, ceil(rho N)) masks (BOSCH Eq. 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation


@dataclass(frozen=True)
class Standing:
    """A mask among all masks of its budget; rank 1 is the best, and equal values share a rank.

    `score_gap` and `log_likelihood_gap` are how far it is below the best mask by each measure.
    `best_by_score` counts the masks that share the highest score.
    """

    score: float
    log_likelihood: float
    score_rank: int
    score_gap: float
    log_likelihood_rank: int
    log_likelihood_gap: float
    masks: int
    best_by_score: int


def count_on_budget(num_layers: int, num_heads: int, swa_ratio: float) -> int:
    """C(N, ceil(rho N)), the number of masks that meet the budget."""
    units = num_layers * num_heads
    return comb(units, swa_budget(units, swa_ratio))


def masks_on_budget(num_layers: int, num_heads: int, swa_ratio: float) -> Iterator[HeadMask]:
    """Every mask with exactly ceil(rho N) sliding KV heads (BOSCH Eq. 1), each once."""
    units = num_layers * num_heads
    for chosen in combinations(range(units), swa_budget(units, swa_ratio)):
        is_full = np.ones(units, dtype=np.bool_)
        is_full[list(chosen)] = False
        yield HeadMask(is_full.reshape(num_layers, num_heads))


def standing(mask: HeadMask, landscape: Mapping[HeadMask, Evaluation]) -> Standing:
    """Ranks and gaps of `mask` among all masks on budget; ValueError if it is none of them."""
    if mask not in landscape:
        raise ValueError(f"{mask!r} is not one of the {len(landscape)} masks on budget")
    entry = landscape[mask]
    scores = np.array([e.score for e in landscape.values()])
    likelihoods = np.array([e.log_likelihood for e in landscape.values()])
    return Standing(
        score=entry.score,
        log_likelihood=entry.log_likelihood,
        score_rank=1 + int((scores > entry.score).sum()),
        score_gap=float(scores.max() - entry.score),
        log_likelihood_rank=1 + int((likelihoods > entry.log_likelihood).sum()),
        log_likelihood_gap=float(likelihoods.max() - entry.log_likelihood),
        masks=len(landscape),
        best_by_score=int((scores == scores.max()).sum()),
    )
