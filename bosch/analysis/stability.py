"""Stability of Algorithm 1: rank correlation of its layer order between seeds.

The order matters: Algorithms 2 and 3 build on the order of layers that Algorithm 1
finds (BOSCH Algorithm 1), and a score counted in examples leaves many layers tied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Stability:
    """Agreement of the rankings of several runs.

    `correlations` are Spearman's rho of each pair of runs, `undefined` the number of pairs left out
    since a run has one value for all layers. `tied` is the mean share of layers that have the same
    value as another layer of their run.
    """

    correlations: list[float]
    undefined: int
    tied: float

    @property
    def mean(self) -> float | None:
        """Mean of the correlations; None where every pair is undefined."""
        return float(np.mean(self.correlations)) if self.correlations else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rho, with ties at average ranks; None if one side is constant."""
    if min(first) == max(first) or min(second) == max(second):
        return None
    return float(stats.spearmanr(first, second).statistic)


def ranking_stability(runs: Sequence[Sequence[float]]) -> Stability:
    """Spearman's rho between each pair of `runs`; a run has one value per layer."""
    pairs = [spearman(a, b) for a, b in itertools.combinations(runs, 2)]
    known = [rho for rho in pairs if rho is not None]
    counts = [np.unique(run, return_counts=True)[1] for run in runs]
    shares = [float(c[c > 1].sum() / len(run)) for run, c in zip(runs, counts, strict=True)]
    return Stability(known, len(pairs) - len(known), float(np.mean(shares)))
