"""BOSCH §2.2: search for a head mask on budget, by Algorithms 1 to 3.

Algorithm 1 (§2.2.1) measures the loss of score when a layer is localised (its units made sliding),
Algorithm 2 (§2.2.2) sets the number of sliding units of each layer, and Algorithm 3 (§2.2.3)
chooses them jointly among layers of equal ratio. Algorithm 2 has two corrections: the drop is
positive when the score falls (with the published sign the hardest layers would slide most), and
when no bucket step fits, the rest is assigned unit by unit, so that the budget is met exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.mask_files import Front
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation
from bosch.search.evaluator import Evaluator
from bosch.search.groups import layer_groups, max_layers_per_group, split_evenly
from bosch.search.loss import Anchors, Loss
from bosch.search.settings import SearchSettings
from bosch.search.subproblem import SubProblem, optimise_layers


@dataclass(frozen=True)
class SearchResult:
    """A head mask on budget, its evaluation, anchors, and results of Algorithms 1 and 2 by layer.

    `last_phase` is the evaluation of the last phase's mask, which differs if a better mask was
    measured before. `front` has masks of other budgets, if any, without the model's name.
    """

    mask: HeadMask
    evaluation: Evaluation
    anchors: Anchors
    last_phase: Evaluation
    layers: list[dict[str, float]] = field(default_factory=list)
    front: Front | None = None


def bosch(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Algorithms 1 to 3; exactly ceil(rho N) units slide. Raises UserError as `Anchors.check`."""
    anchors, loss = measure_anchors(evaluator, settings)
    importance = layer_importance(evaluator, settings, loss)
    ratios = rank_layers(evaluator, settings, importance, anchors)
    mask = head_selection(evaluator, settings, loss, ratios.quotas)
    rows = layer_rows(importance, ratios, evaluator)
    return final_result(evaluator, settings, mask, anchors, rows)


def final_result(
    evaluator: Evaluator,
    settings: SearchSettings,
    mask: HeadMask,
    anchors: Anchors,
    layers: list[dict[str, float]] | None = None,
) -> SearchResult:
    """The best mask on budget of the search; with `strict` the last phase's `mask`.

    `mask` is a mask of units, the result's a mask of heads. Adds a note if the two differ.
    """
    sliding, budget = mask.num_sliding, evaluator.budget
    assert sliding == budget, f"{sliding} units sliding on a budget of {budget}"
    evaluation = evaluator.evaluate(mask, "final", "final mask")
    result = evaluator.units.head_mask(mask), evaluation
    best = evaluator.best_on_budget
    assert best is not None
    if best[1].rank > evaluation.rank:
        evaluator.note(
            f"the last phase's mask scores {_scores(evaluation)}, the best mask on budget that was "
            f"measured {_scores(best[1])}: "
            + ("search.strict returns the former" if settings.strict else "the latter is returned")
        )
        result = result if settings.strict else best
    return SearchResult(*result, anchors, evaluation, layers or [])


def _scores(evaluation: Evaluation) -> str:
    return f"{evaluation.score:.4f} (log-likelihood {evaluation.log_likelihood:.4f})"


def measure_anchors(evaluator: Evaluator, settings: SearchSettings) -> tuple[Anchors, Loss | None]:
    """Anchors and, with `strict`, the loss; raises UserError if there is nothing to search for."""
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    if settings.break_ties:
        evaluator.note("masks of equal score were ranked by the answers' log-likelihood")
    return anchors, Loss(anchors, settings.alpha, settings.gamma) if settings.strict else None


def rank_layers(
    evaluator: Evaluator, settings: SearchSettings, importance: LayerImportance, anchors: Anchors
) -> LayerRatios:
    """Algorithm 2; adds a note if the scores of Algorithm 1 do not rank the layers."""
    drops = importance.averaged(
        layer_drops(importance.best_scores, anchors.all_full, anchors.all_full)
    )
    tie_drops = None
    if settings.break_ties:
        full = evaluator.units.head_mask(HeadMask.all_full(*evaluator.shape))
        original = evaluator.log.get(full)
        assert original is not None
        tie_drops = importance.averaged(
            layer_drops(importance.best_log_likelihoods, original.log_likelihood, scale=1.0)
        )
    _note_ties(evaluator, drops, importance.groups, settings.break_ties)
    return assign_ratios(drops, evaluator.shape[1], evaluator.budget, settings.buckets, tie_drops)


def _note_ties(
    evaluator: Evaluator, drops: np.ndarray, groups: Sequence[Sequence[int]], break_ties: bool
) -> None:
    """Add a note if some groups (by default layers) of Algorithm 1 have equal drops."""
    rounded = np.round(drops[[group[0] for group in groups]], 12)
    values, counts = np.unique(rounded, return_counts=True)
    tied = int(counts[counts > 1].sum())
    if tied == 0:
        return
    name = "layers" if len(groups) == len(drops) else "groups of layers"
    layers = f"all {name}" if len(values) == 1 else f"{tied} of {len(groups)} {name}"
    if not break_ties:
        effect = "their ranking is arbitrary"
    elif len(values) == 1:
        effect = "every layer gets the same ratio"
    else:
        effect = "their log-likelihoods rank them"
    evaluator.note(f"Algorithm 1 measured the same drop of the score for {layers}: {effect}")


def layer_rows(
    importance: LayerImportance,
    ratios: LayerRatios,
    evaluator: Evaluator,
    quotas: Sequence[int] | None = None,
) -> list[dict[str, float]]:
    """Records by layer for the summary: results of Algorithm 1 and ratios of Algorithm 2."""
    units = evaluator.shape[1]
    return [
        {
            "layer": layer,
            "best_score": importance.best_scores[layer],
            "best_log_likelihood": importance.best_log_likelihoods[layer],
            "drop": ratios.drops[layer],
            "weight": ratios.weights[layer],
            "ratio": quota / units,
        }
        for layer, quota in enumerate(quotas or ratios.quotas)
    ]


@dataclass(frozen=True)
class LayerImportance:
    """Score and log-likelihood after localising each layer, by layer index, and the last mask.

    Layers above were localised before; those of a group in `groups` together, with equal entries.
    """

    best_scores: list[float]
    best_log_likelihoods: list[float]
    mask: HeadMask
    groups: list[list[int]]

    def averaged(self, drops: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Drops, with the drop of each group spread evenly over its layers."""
        result = drops.copy()
        for group in self.groups:
            result[group] = drops[group].mean()
        return result


def layer_importance(
    evaluator: Evaluator,
    settings: SearchSettings,
    loss: Loss | None = None,
    layers_per_group: int = 1,
) -> LayerImportance:
    """Localise ceil(rho H) units in each layer in turn, top layer first (Algorithm 1).

    With more `layers_per_group` neighbours are searched jointly, with ceil(rho |g| H) units.
    """
    num_layers, units = evaluator.shape
    mask = HeadMask.all_full(num_layers, units)  # line 3
    scores, log_likelihoods = [0.0] * num_layers, [0.0] * num_layers
    groups = layer_groups(num_layers, layers_per_group)
    for group in reversed(groups):  # line 4
        quota = swa_budget(len(group) * units, settings.swa_ratio)
        subproblem = SubProblem(mask, group, quota, "layer_importance", group_name(group))
        solution = optimise_layers(evaluator, settings, loss, subproblem)  # lines 5 to 7
        mask = solution.mask
        for layer in group:
            scores[layer] = solution.evaluation.score  # line 8
            log_likelihoods[layer] = solution.evaluation.log_likelihood
    return LayerImportance(scores, log_likelihoods, mask, groups)  # line 9


def group_name(group: Sequence[int]) -> str:
    """Name of a group of neighbouring layers in logs and traces."""
    return f"layer {group[0]}" if len(group) == 1 else f"layers {group[0]} to {group[-1]}"


_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class LayerRatios:
    """Result by layer: d (`drops`), w (`weights`, 1 is hardest) and sliding units (`quotas`)."""

    drops: list[float]
    weights: list[float]
    quotas: list[int]
    hardest_first: list[int]


def layer_drops(best: Sequence[float], original: float, scale: float) -> npt.NDArray[np.float64]:
    """d_l = drop_l - drop_{l+1}: the additional loss from localising layer l."""
    drop = (original - np.asarray(best, dtype=np.float64)) / scale  # line 6, its sign corrected
    return drop - np.append(drop[1:], 0.0)  # line 7


def layer_weights(drops: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """d clipped to its 2.5 and 97.5 percentiles and rescaled to w in [0, 1]; 0.5 if all equal."""
    low, high = np.percentile(drops, _PERCENTILES)  # line 8
    if high <= low:
        return np.full(len(drops), 0.5)
    clipped = np.clip(drops, low, high)  # line 10
    return (clipped - low) / (high - low)  # line 11


def assign_ratios(
    drops: npt.NDArray[np.float64],
    num_heads: int,
    budget: int,
    buckets: Sequence[float],
    tie_drops: npt.NDArray[np.float64] | None = None,
) -> LayerRatios:
    """Sliding units per layer, `budget` in all (Algorithm 2).

    `drops` is d from `layer_drops`. Layers of equal weight are ordered by `tie_drops`, if given
    (hardest is largest), then by index. With `tie_drops`, if all layers have the same weight, they
    get the uniform ratio, since no score distinguishes them. A bucket b means ceil(b H) units.
    """
    num_layers = len(drops)
    weights = layer_weights(drops)
    tie = np.zeros(num_layers) if tie_drops is None else tie_drops
    hardest_first = np.lexsort((np.arange(num_layers), -tie, -weights)).tolist()
    units = [swa_budget(num_heads, b) for b in buckets]
    if tie_drops is not None and np.ptp(weights) == 0:
        quotas = [budget // num_layers] * num_layers
    else:
        rank = [0] * num_layers
        for j, group in enumerate(split_evenly(hardest_first, len(buckets))):  # line 12
            for layer in group:
                rank[layer] = j  # line 13
        quotas = _step_to_target(rank, units, hardest_first, budget)
    # Single units: the easiest layers get the rest, or the hardest give up a surplus.
    quotas = _step_to_target(quotas, range(num_heads + 1), hardest_first, budget)
    return LayerRatios(drops.tolist(), weights.tolist(), quotas, hardest_first)


def _step_to_target(
    ranks: list[int], units: Sequence[int], hardest_first: list[int], target: int
) -> list[int]:
    """Move layers between neighbouring sizes while a step fits the gap (lines 17 to 33)."""
    rank = list(ranks)
    gap = target - sum(units[r] for r in rank)  # lines 14 and 15
    direction = 1 if gap > 0 else -1
    order = hardest_first[::-1] if gap > 0 else hardest_first  # line 16
    moved = True
    while gap != 0 and moved:
        moved = False
        for layer in order:
            neighbour = rank[layer] + direction
            if not 0 <= neighbour < len(units):
                continue
            step = units[neighbour] - units[rank[layer]]
            if abs(step) <= abs(gap):
                rank[layer] = neighbour
                gap -= step
                moved = True
    return [units[r] for r in rank]  # line 34


def ratio_groups(
    quotas: Sequence[int], num_heads: int, max_variables: int
) -> list[tuple[list[int], int]]:
    """Layers of equal quota, most sliding first, as (layers, units of one layer).

    Too many variables are split evenly into subgroups of neighbours in depth, the deepest first, so
    that layers below do not change while one is searched. Those without sliding units are left out.
    """
    limit = max_layers_per_group(num_heads, max_variables)
    groups = []
    for quota in sorted(set(quotas) - {0}, reverse=True):
        layers = [layer for layer, q in enumerate(quotas) if q == quota]
        subgroups = -(-len(layers) // limit) if quota < num_heads else 1
        groups += [(subgroup, quota) for subgroup in reversed(split_evenly(layers, subgroups))]
    return groups


def head_selection(
    evaluator: Evaluator, settings: SearchSettings, loss: Loss | None, quotas: Sequence[int]
) -> HeadMask:
    """Choose sliding units within the sum of `quotas` of each group (Algorithm 3).

    `quotas` are M of line 5. Starts all full; groups of ratio 0 and 1 are set, not searched.
    """
    num_layers, units = evaluator.shape
    mask = HeadMask.all_full(num_layers, units)  # line 4
    groups = ratio_groups(quotas, units, settings.max_group_variables)  # line 6
    for number, (layers, quota) in enumerate(groups):  # line 7
        if quota == units:
            is_full = mask.is_full
            is_full[layers] = False
            mask = evaluator.mask(is_full)
            continue
        total = quota * len(layers)
        subproblem = SubProblem(mask, layers, total, "head_selection", f"group {number}")
        solution = optimise_layers(evaluator, settings, loss, subproblem)  # lines 8 to 10
        mask = solution.mask
        if solution.plateau:
            arbitrary = "the choice of its heads is arbitrary"
            by_likelihood = "its heads were chosen by log-likelihood alone"
            evaluator.note(
                f"group {number} (layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}): "
                f"every candidate {solution.plateau}; "
                f"{by_likelihood if settings.break_ties else arbitrary}"
            )
    return mask  # line 11
