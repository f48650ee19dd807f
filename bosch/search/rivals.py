"""Searches for comparison, not in the paper: whole mask, one gradient, gates.

Each finds a mask with exactly ceil(rho N) sliding units.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bosch.masks import HeadMask
from bosch.search.bosch import SearchResult, final_result, measure_anchors
from bosch.search.evaluator import SHARES, Evaluator
from bosch.search.gates import Gates
from bosch.search.gradient_search import check_passes
from bosch.search.settings import SearchSettings, plus_budget
from bosch.search.subproblem import SubProblem, optimise_layers


def one_plus_one(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """The (1+1) algorithm on the whole mask with kappa L evaluations."""
    anchors, loss = measure_anchors(evaluator, settings)
    shape = evaluator.shape
    full, layers = HeadMask.all_full(*shape), range(shape[0])
    subproblem = SubProblem(full, layers, evaluator.budget, "head_selection", "whole mask")
    settings = replace(settings, solver="one_plus_one")
    solution = optimise_layers(evaluator, settings, loss, subproblem)
    return final_result(evaluator, settings, solution.mask, anchors)


def one_gradient(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """One gradient at the original model values all units; those of least value become sliding."""
    anchors, _ = measure_anchors(evaluator, settings)
    full = HeadMask.all_full(*evaluator.shape)
    values = np.array(evaluator.gate_gradient(full, 0, 1).values)
    bits = np.ones(values.size, dtype=np.bool_)
    bits[np.argsort(values.reshape(-1), kind="stable")[: evaluator.budget]] = False
    return final_result(evaluator, settings, evaluator.mask(bits), anchors)


def learned_gates(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Gates learned by gradient at an exact ratio, the largest of which stay full.

    See `bosch.search.gates`. Spends kappa L / 10 evaluations, each gradient at its cost. UserError
    if these do not suffice for a gradient and a mask.
    """
    anchors, _ = measure_anchors(evaluator, settings)
    shape = evaluator.shape
    units = shape[0] * shape[1]
    full_units = units - evaluator.budget
    gates = Gates(units, full_units, np.random.default_rng(settings.seed))
    budget = float(plus_budget(settings, shape[0]))
    if settings.head_granularity > 1:  # a gradient has formed the units
        budget -= evaluator.cost_of_gradient(0, SHARES)
    check_passes(1 + evaluator.cost_of_gradient(0, SHARES), budget, "one gradient and one mask")
    left, step = budget - 1.0, 0  # the final mask is evaluated, too
    while step < 100 * SHARES and left >= evaluator.cost_of_gradient(step % SHARES, SHARES):
        mask = evaluator.mask(gates.draw())
        gradient = evaluator.gate_gradient(mask, step % SHARES, SHARES)
        gates.learn(np.array(gradient.values).reshape(-1))
        left -= evaluator.cost_of_gradient(step % SHARES, SHARES)
        step += 1
    return final_result(evaluator, settings, evaluator.mask(gates.mask()), anchors)
