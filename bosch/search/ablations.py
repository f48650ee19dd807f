"""The ablations (BOSCH §3.4): masks of Algorithm 1 alone, by layers, groups, whole layers."""

from __future__ import annotations

from bosch.masks import HeadMask
from bosch.search import bosch as algorithms
from bosch.search.evaluator import Evaluator
from bosch.search.groups import max_layers_per_group
from bosch.search.settings import SearchSettings
from bosch.search.subproblem import SubProblem, optimise_layers, restore_units


def b_single(evaluator: Evaluator, settings: SearchSettings) -> algorithms.SearchResult:
    """B-single: the mask of Algorithm 1 itself, without Algorithms 2 and 3.

    Units beyond ceil(rho N), if rho H is no integer, become full again in the hardest layers.
    """
    return _algorithm_one(evaluator, settings, layers_per_group=1)


def b_multi(evaluator: Evaluator, settings: SearchSettings) -> algorithms.SearchResult:
    """B-multi: the mask of Algorithm 1 over groups of neighbouring layers.

    Groups fit `max_group_variables`, as in Algorithm 3, with kappa evaluations a layer. A surplus
    becomes full as in B-single.
    """
    per_group = max_layers_per_group(evaluator.shape[1], settings.max_group_variables)
    return _algorithm_one(evaluator, settings, per_group)


def b_layer(evaluator: Evaluator, settings: SearchSettings) -> algorithms.SearchResult:
    """B-layer: Algorithm 1 at layer granularity, one run of L variables and kappa L evaluations.

    Units beyond ceil(rho N), if rho L is no integer, become full where a full layer scores best.
    """
    anchors, loss = algorithms.measure_anchors(evaluator, settings)
    layers, units = evaluator.shape
    quota = -(-evaluator.budget // units)
    all_layers = list(range(layers))
    full, name = HeadMask.all_full(layers, units), algorithms.group_name(all_layers)
    subproblem = SubProblem(full, all_layers, quota, "layer_importance", name, whole_layers=True)
    solution = optimise_layers(evaluator, settings, loss, subproblem)
    mask, surplus = solution.mask, quota * units - evaluator.budget
    if solution.plateau:
        criterion = "by log-likelihood alone" if settings.break_ties else "arbitrarily"
        evaluator.note(
            f"every choice of {quota} layers {solution.plateau}: "
            f"the sliding layers were chosen {criterion}"
        )
    if surplus > 0:
        layer = _best_layer_to_restore(evaluator, settings, mask)
        evaluator.note(
            f"whole layers would localise {surplus} units too many: turned back in layer {layer}"
        )
        mask = restore_units(evaluator, settings, mask, [layer], surplus)
    return algorithms.final_result(evaluator, settings, mask, anchors)


def _algorithm_one(
    evaluator: Evaluator, settings: SearchSettings, layers_per_group: int
) -> algorithms.SearchResult:
    anchors, loss = algorithms.measure_anchors(evaluator, settings)
    importance = algorithms.layer_importance(evaluator, settings, loss, layers_per_group)
    ratios = algorithms.rank_layers(evaluator, settings, importance, anchors)
    mask = importance.mask
    surplus = mask.num_sliding - evaluator.budget
    if surplus > 0:
        note = f"Algorithm 1 localised {surplus} units too many: turned back in the hardest layers"
        evaluator.note(note)
        mask = restore_units(evaluator, settings, mask, ratios.hardest_first, surplus)
    quotas = (~mask.is_full).sum(axis=1).tolist()
    rows = algorithms.layer_rows(importance, ratios, evaluator, quotas)
    return algorithms.final_result(evaluator, settings, mask, anchors, rows)


def _best_layer_to_restore(evaluator: Evaluator, settings: SearchSettings, mask: HeadMask) -> int:
    """The sliding layer that gives the best score when it becomes full again."""

    def rank(layer: int) -> tuple[float, float]:
        is_full = mask.is_full
        is_full[layer] = True
        whole = evaluator.mask(is_full)
        return settings.sort_key(*evaluator.evaluate(whole, "repair", f"layer {layer}").rank)

    return max((i for i, row in enumerate(mask.windows) if any(row)), key=rank)
