"""Parameters of a search, named as in the recipe. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bosch.errors import UserError

SolverName = Literal["nomad", "nomad_penalty", "one_plus_one"]

# Fewest passes of bosch_plus for a small kappa.
MIN_PLUS_BUDGET = 4


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search for a head mask; numbers default to the paper's (B.2).

    `SearchConfig`, the recipe's section `search`, documents and checks every field; here only the
    ratio, the budget and the granularity are checked again. `strict` is the published procedure: of
    masks with equal scores the first one stays, layers with equal drops are ranked by index, the
    last phase's mask is the result, and `alpha` and `gamma` are those of its loss. By default
    log-likelihoods decide between equal scores, layers get the uniform ratio if all tie, and the
    best mask on budget that was measured is the result. With `head_granularity` g the full heads of
    every layer are a multiple of g.
    """

    swa_ratio: float
    solver: SolverName = "nomad"
    budget_per_layer: int = 100
    alpha: float = 100.0
    gamma: float = 0.2
    buckets: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    max_group_variables: int = 50
    strict: bool = False
    seed: int = 0
    mask: str | None = None
    head_granularity: int = 1

    def __post_init__(self) -> None:
        """Raises UserError for values outside their range, and nomad_penalty without `strict`."""
        if self.solver == "nomad_penalty" and not self.strict:
            raise UserError(
                "nomad_penalty minimises the published loss, which only a strict search has; set "
                "search.strict: true, or solver: nomad",
                "search.solver",
            )
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
        if self.head_granularity < 1:
            raise UserError(
                f"search.head_granularity is {self.head_granularity}: a unit of choice has "
                "at least one head, choose 1 or more"
            )

    @property
    def break_ties(self) -> bool:
        """Whether the answers' log-likelihood decides between masks of equal score."""
        return not self.strict

    def sort_key(self, score: float, log_likelihood: float) -> tuple[float, float]:
        """Sort key, larger is better: the score, then, with `break_ties`, the log-likelihood."""
        return score, log_likelihood if self.break_ties else 0.0


def plus_budget(settings: SearchSettings, num_layers: int) -> int:
    """Passes of bosch_plus without anchors: kappa L / 10 or a minimum; gradients at their cost."""
    return max(MIN_PLUS_BUDGET, round(settings.budget_per_layer * num_layers / 10))


def front_budget(settings: SearchSettings, num_layers: int) -> int:
    """Passes of a search for a front: 1.5 times those of `bosch_plus` for one budget."""
    return math.ceil(1.5 * plus_budget(settings, num_layers))
