"""Searches that stay on budget by swapping sliding units with full ones."""

from __future__ import annotations

import numpy as np

from bosch.search.solvers.problem import Bits, Problem, random_bits

_TRIES_PER_STEP = 200


def one_plus_one(problem: Problem, seed: int) -> None:
    """The (1+1) evolutionary algorithm (Droste et al. 2002), with swaps instead of bit flips.

    One parent and one child per step; the child replaces the parent if it is no worse. The original
    algorithm flips each bit with probability 1/n and so almost never meets the budget. Here each
    step swaps k sliding units with k full ones, where k - 1 is binomial with the same 1/n. Starts
    from a random mask; a seed determines the steps. Spends the problem's budget, unless 200 draws
    in a row are known masks, which happens when the budget is near the number of all masks.
    """
    rng = np.random.default_rng(seed)
    parent = random_bits(problem.size, problem.quota, rng)
    parent_value = problem.value(parent)
    while problem.left > 0:
        child = _unknown_child(problem, parent, rng)
        if child is None:
            return
        value = problem.value(child)
        if value <= parent_value:
            parent, parent_value = child, value


def _unknown_child(problem: Problem, parent: Bits, rng: np.random.Generator) -> Bits | None:
    """A mutation of `parent` that was not evaluated yet; larger swaps after half of the tries."""
    max_swaps = min(problem.quota, problem.size - problem.quota)
    for attempt in range(_TRIES_PER_STEP):
        rate = 1.0 / problem.size if attempt < _TRIES_PER_STEP // 2 else 0.5
        child = swap(parent, 1 + int(rng.binomial(max_swaps - 1, rate)), rng)
        if not problem.known(child):
            return child
    return None


def swap(bits: Bits, count: int, rng: np.random.Generator) -> Bits:
    """`bits` with `count` random sliding units swapped with as many full ones."""
    child = bits.copy()
    child[rng.choice(np.flatnonzero(bits), count, replace=False)] = False
    child[rng.choice(np.flatnonzero(~bits), count, replace=False)] = True
    return child
