"""Every candidate on budget, in lexicographic order."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from bosch.search.solvers.problem import Problem


def brute_force(problem: Problem) -> None:
    """Evaluate all C(size, quota) candidates; the first of equal ones stays the best."""
    for chosen in combinations(range(problem.size), problem.quota):
        bits = np.zeros(problem.size, dtype=np.bool_)
        bits[list(chosen)] = True
        problem.value(bits)
