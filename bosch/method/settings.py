"""Parameters of a search, in the names of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bosch.errors import UserError
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

    def __post_init__(self) -> None:
        """Raises UserError for a ratio that no mask has or a budget without an evaluation."""
        if not 0.0 <= self.swa_ratio <= 1.0:
            raise UserError(
                f"search.swa_ratio is {self.swa_ratio}: no head mask has that share of sliding "
                "heads, choose one from 0 to 1"
            )
        if self.budget_per_layer < 1:
            raise UserError(
                f"search.budget_per_layer is {self.budget_per_layer}: every layer that is searched "
                "needs at least one evaluation, choose 1 or more"
            )

    def seed_for(self, *parts: int) -> int:
        """A seed of its own for one sub-problem, the same whatever was searched before it."""
        return int(np.random.SeedSequence([self.seed, *parts]).generate_state(1)[0])
