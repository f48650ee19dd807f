"""Searches for comparison, not in the paper: whole mask, single heads, layers, gradients, gates.

Each finds a mask with exactly ceil(rho N) sliding units.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bosch.heads import HeadMask
from bosch.search.bosch import SearchResult, final_result, measure_anchors
from bosch.search.evaluator import SHARES, Evaluator
from bosch.search.gates import Gates
from bosch.search.gradient_search import check_passes
from bosch.search.settings import SearchSettings, SolverName, plus_budget
from bosch.search.subproblem import SubProblem, optimise_layers


def one_plus_one(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """The (1+1) algorithm on the whole mask with kappa L evaluations."""
    return _whole_mask(evaluator, settings, "one_plus_one")


def annealing(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Simulated annealing on the whole mask with kappa L evaluations."""
    return _whole_mask(evaluator, settings, "annealing")


def _whole_mask(evaluator: Evaluator, settings: SearchSettings, solver: SolverName) -> SearchResult:
    anchors, loss = measure_anchors(evaluator, settings)
    shape = evaluator.shape
    full, layers = HeadMask.all_full(*shape), range(shape[0])
    subproblem = SubProblem(full, layers, evaluator.budget, "head_selection", "whole mask")
    solution = optimise_layers(evaluator, replace(settings, solver=solver), loss, subproblem)
    return final_result(evaluator, settings, solution.mask, anchors)


def single_ablation(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Each unit slides alone; those whose score drops least become sliding.

    N evaluations. After the single-head ablation on key-value retrieval of arXiv 2602.11374, with
    the calibration set as retrieval examples. Equal scores are ranked by log-likelihood.
    """
    anchors, _ = measure_anchors(evaluator, settings)
    full = HeadMask.all_full(*evaluator.shape)
    ranks = []
    for layer, row in enumerate(full.is_full):
        for head in range(len(row)):
            changed = row.copy()
            changed[head] = False
            mask = full.with_layer(layer, changed)
            result = evaluator.evaluate(mask, "ablation", f"layer {layer}", shared_layers=layer)
            ranks.append(settings.sort_key(*result.rank))
    # sorted() is stable: among equal units that of lower index slides.
    order = sorted(range(len(ranks)), key=lambda unit: ranks[unit], reverse=True)
    bits = np.ones(len(ranks), dtype=np.bool_)
    bits[order[: evaluator.budget]] = False
    return final_result(evaluator, settings, HeadMask(bits.reshape(full.is_full.shape)), anchors)


def layer_ablation(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Each layer slides alone: the layers whose answers lose least log-likelihood become sliding.

    L evaluations. After arXiv 2606.27791. The rest of the budget, less than a layer, slides in the
    next layer, units of lower index first.
    """
    return _by_layer(evaluator, settings, stays_full=False)


def layer_restoration(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Each layer is full alone: the layers whose answers gain most log-likelihood stay full.

    L evaluations. After arXiv 2512.20569, by the answers' log-likelihood in place of a divergence,
    and without training. In a partly full layer units of lower index are full.
    """
    return _by_layer(evaluator, settings, stays_full=True)


def _by_layer(evaluator: Evaluator, settings: SearchSettings, stays_full: bool) -> SearchResult:
    """Evaluate each layer's change alone; the best layers within the budget keep the change."""
    anchors, _ = measure_anchors(evaluator, settings)
    layers, units = evaluator.shape
    base = HeadMask(np.full((layers, units), not stays_full))
    likelihoods = []
    for layer in range(layers):
        mask = base.with_layer(layer, [stays_full] * units)
        result = evaluator.evaluate(mask, "ablation", f"layer {layer}", shared_layers=layer)
        likelihoods.append(result.log_likelihood)
    is_full = base.is_full.copy()
    left = layers * units - evaluator.budget if stays_full else evaluator.budget
    for layer in sorted(range(layers), key=lambda i: -likelihoods[i]):
        is_full[layer, : min(left, units)] = stays_full
        left -= min(left, units)
    return final_result(evaluator, settings, HeadMask(is_full), anchors)


def one_gradient(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """One gradient at the original model values all units; those of least value become sliding.

    First-order changes of the answers' log-likelihood, as in MoA's profile (arXiv 2406.14909).
    """
    anchors, _ = measure_anchors(evaluator, settings)
    full = HeadMask.all_full(*evaluator.shape)
    values = np.array(evaluator.gate_gradient(full, 0, 1).values)
    bits = np.ones(values.size, dtype=np.bool_)
    bits[np.argsort(values.reshape(-1), kind="stable")[: evaluator.budget]] = False
    return final_result(evaluator, settings, HeadMask(bits.reshape(values.shape)), anchors)


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
        mask = HeadMask(gates.draw().reshape(shape))
        gradient = evaluator.gate_gradient(mask, step % SHARES, SHARES)
        gates.learn(np.array(gradient.values).reshape(-1))
        left -= evaluator.cost_of_gradient(step % SHARES, SHARES)
        step += 1
    return final_result(evaluator, settings, HeadMask(gates.mask().reshape(shape)), anchors)
