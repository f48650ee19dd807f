"""Which budget of a front a training step is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

# Steps of a cycle for the scarcest budget and for the largest; each budget between them has one.
# The scarcest has the most to learn, and little of what it needs is learnt by the others.
SCARCEST, LARGEST = 3, 2
_STREAM = 21  # of random numbers, apart from that of the order of the data


def budget_weights(count: int) -> tuple[int, ...]:
    """Steps of a cycle for each of `count` budgets, the scarcest first."""
    return (SCARCEST, *[1] * (count - 2), LARGEST)[-count:] if count > 1 else (1,)


@dataclass(frozen=True)
class BudgetDraw:
    """Budgets by the number of a step: every cycle of steps has each in its share, reshuffled.

    `budgets` are KV slots, ascending. Nothing else decides: neither what was drawn before, nor the
    process, nor the micro-batch.
    """

    budgets: tuple[int, ...]
    seed: int

    @cached_property
    def _cycle(self) -> list[int]:
        weights = budget_weights(len(self.budgets))
        pairs = zip(self.budgets, weights, strict=True)
        return [slots for slots, times in pairs for _ in range(times)]

    def of_step(self, step: int) -> int:
        """KV slots of the budget of step `step` (from 1)."""
        import numpy as np  # not for every command that reads a recipe

        number, place = divmod(step - 1, len(self._cycle))
        order = np.random.default_rng([self.seed, _STREAM, number]).permutation(len(self._cycle))
        return self._cycle[order[place]]


def mean_over_budgets(values: Mapping[int, float]) -> float:
    """The mean over the steps of a cycle of a value for each budget, by its KV slots; 0 of none."""
    if not values:
        return 0.0
    weights = budget_weights(len(values))
    total = sum(w * values[slots] for slots, w in zip(sorted(values), weights, strict=True))
    return total / sum(weights)
