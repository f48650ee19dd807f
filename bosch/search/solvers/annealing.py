"""Simulated annealing (Kirkpatrick et al. 1983) by swaps on budget.

The temperature falls from a tenth of the loss's range to a thousandth, in equal ratios over the
budget. Losses that tie are compared by log-likelihood where the problem breaks ties.
"""

from __future__ import annotations

import numpy as np

from bosch.search.solvers.one_plus_one import swap
from bosch.search.solvers.problem import Problem, random_bits

_HOT, _COLD = 0.1, 0.001
_FRUITLESS = 200


def annealing(problem: Problem, seed: int) -> None:
    """Spend the problem's budget from a random start; the same seed, the same steps."""
    rng = np.random.default_rng(seed)
    parent = random_bits(problem.size, problem.quota, rng)
    parent_value = problem.value(parent)
    if problem.quota in (0, problem.size):
        return
    fruitless = 0
    while problem.left > 0 and fruitless < _FRUITLESS:
        spent = problem.spent
        child = swap(parent, 1, rng)
        value = problem.value(child)
        temperature = _HOT * (_COLD / _HOT) ** (problem.spent / problem.budget)
        rise = problem.scalar(value) - problem.scalar(parent_value)
        if value <= parent_value or rng.random() < np.exp(-rise / temperature):
            parent, parent_value = child, value
        fruitless = fruitless + 1 if problem.spent == spent else 0
