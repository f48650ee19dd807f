"""Searches for comparison, not in the paper: whole mask, one gradient.

Each finds a mask with exactly ceil(rho N) sliding units.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bosch.masks import HeadMask
from bosch.search.bosch import SearchResult, final_result, measure_anchors
from bosch.search.evaluator import Evaluator
from bosch.search.settings import SearchSettings
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
