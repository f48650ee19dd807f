"""Optimisers of one sub-problem: which of its units become sliding."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from bosch.search.settings import SolverName
from bosch.search.solvers.nomad import MAX_NOMAD_VARIABLES, nomad
from bosch.search.solvers.problem import Candidate, Problem
from bosch.search.solvers.swaps import one_plus_one

__all__ = ["Candidate", "Problem", "brute_force", "nomad", "one_plus_one", "solve"]


def solve(problem: Problem, solver: SolverName, seed: int) -> Candidate:
    """Best candidate on budget, by enumeration if the evaluations suffice, else by `solver`.

    With too many variables for NOMAD's quadratic models, by the (1+1) search (BOSCH B.2).
    """
    if math.comb(problem.size, problem.quota) <= problem.budget:
        brute_force(problem)
    elif solver == "one_plus_one" or problem.size > MAX_NOMAD_VARIABLES:
        one_plus_one(problem, seed)
    else:
        nomad(problem, seed, stay_on_budget=solver == "nomad")
    problem.report_off_budget()
    return problem.result()


def brute_force(problem: Problem) -> None:
    """Evaluate all C(size, quota) candidates; the first of equal candidates is the best."""
    for chosen in combinations(range(problem.size), problem.quota):
        bits = np.zeros(problem.size, dtype=np.bool_)
        bits[list(chosen)] = True
        problem.value(bits)
