"""The budget of a front that each training step trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

# Steps of a cycle for the smallest and for the largest budget; each budget between has one. The
# smallest has the most to learn, and gains little from the steps of the others.
SMALLEST, LARGEST = 3, 2
_STREAM = 21  # of random numbers, separate from the data order's


def budget_weights(count: int) -> tuple[int, ...]:
    """Steps of a cycle for each of `count` budgets, the smallest first."""
    return (SMALLEST, *[1] * (count - 2), LARGEST)[-count:] if count > 1 else (1,)


@dataclass(frozen=True)
class BudgetDraw:
    """Budgets by step number: each cycle of steps is shuffled, and has each budget in its share.

    `budgets` are KV slots, ascending. A step's budget depends on nothing else, such as earlier
    draws, the process or the micro-batch.
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
        import numpy as np  # not needed by every command that reads a recipe

        cycle, position = divmod(step - 1, len(self._cycle))
        order = np.random.default_rng([self.seed, _STREAM, cycle]).permutation(len(self._cycle))
        return self._cycle[order[position]]


def mean_over_budgets(values: Mapping[int, float]) -> float:
    """Mean over a cycle's steps of a value for each budget, by its KV slots."""
    weights = budget_weights(len(values))
    total = sum(w * values[slots] for slots, w in zip(sorted(values), weights, strict=True))
    return total / sum(weights)
