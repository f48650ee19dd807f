"""Parameters of a search, in the names of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bosch.solvers import SolverName


@dataclass(frozen=True)
class SearchSettings:
    """What the search for a head mask can be told; the defaults are the paper's (B.2)."""

    swa_ratio: float
    solver: SolverName = "nomad"
    budget_per_layer: int = 100
    alpha: float = 100.0
    gamma: float = 0.2
    buckets: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    max_group_variables: int = 50
    break_ties: bool = False
    race: bool = False
    seed: int = 0

    def seed_for(self, *parts: int) -> int:
        """A seed of its own for one sub-problem, the same whatever was searched before it."""
        return int(np.random.SeedSequence([self.seed, *parts]).generate_state(1)[0])
