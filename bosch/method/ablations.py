"""The ablations (BOSCH 3.4): masks of stage 1 alone, by layers, groups of layers, whole layers."""

from __future__ import annotations

from bosch.heads import HeadMask, swa_budget
from bosch.method.bosch import (
    SearchResult,
    finished,
    layer_rows,
    prepared,
    ranked_layers,
)
from bosch.method.head_selection import max_layers_per_group
from bosch.method.layer_importance import group_name, layer_importance
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.method.subproblem import optimise_layers, restore_units


def b_single(ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """B-single: the mask of stage 1 itself, without stages 2 and 3.

    Where rho H is no whole number stage 1 localises more than ceil(rho N) units; the surplus is
    turned back in the hardest layers.
    """
    return _stage_one(ledger, settings, layers_per_group=1)


def b_multi(ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """B-multi: the mask of stage 1 when it localises several neighbouring layers at a time.

    A group has as many layers as fit `max_group_variables`, as in stage 3, and kappa evaluations
    for each of them. A surplus is turned back as in B-single.
    """
    heads = ledger.scorer.num_key_value_heads
    return _stage_one(ledger, settings, max_layers_per_group(heads, settings.max_group_variables))


def b_layer(ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """B-layer: stage 1 at layer granularity, one run of L variables and kappa L evaluations.

    Where rho L is no whole number the ceil(rho L) layers hold more than ceil(rho N) units; the
    surplus, less than a layer, is turned back in the one layer whose return helps most.
    """
    anchors, loss = prepared(ledger, settings)
    layers, heads = ledger.scorer.num_layers, ledger.scorer.num_key_value_heads
    budget = swa_budget(layers * heads, settings.swa_ratio)
    quota = -(-budget // heads)
    everything = list(range(layers))
    solution = optimise_layers(
        ledger, settings, loss, HeadMask.all_full(layers, heads), everything, quota,
        "layer_importance", group_name(everything), whole_layers=True,
    )  # fmt: skip
    mask, surplus = solution.mask, quota * heads - budget
    if solution.plateau:
        how = "by log-likelihood alone" if settings.break_ties else "arbitrarily"
        ledger.note(
            f"every choice of {quota} layers scored {solution.evaluation.score:.4g}: "
            f"the sliding layers were chosen {how}"
        )
    if surplus > 0:
        layer = _layer_worth_most(ledger, settings, mask)
        ledger.note(
            f"whole layers would localise {surplus} units too many: turned back in layer {layer}"
        )
        mask = restore_units(ledger, settings, mask, [layer], surplus)
    return finished(ledger, settings, mask, anchors)


def _stage_one(ledger: Ledger, settings: SearchSettings, layers_per_group: int) -> SearchResult:
    anchors, loss = prepared(ledger, settings)
    importance = layer_importance(ledger, settings, loss, layers_per_group)
    ratios = ranked_layers(ledger, settings, importance, anchors)
    mask = importance.mask
    surplus = int((~mask.is_full).sum()) - swa_budget(mask.is_full.size, settings.swa_ratio)
    if surplus > 0:
        ledger.note(
            f"stage 1 localised {surplus} units too many: turned back in the hardest layers"
        )
        mask = restore_units(ledger, settings, mask, ratios.hardest_first, surplus)
    quotas = [len(heads) for heads in mask.swa_kv_heads]
    rows = layer_rows(importance, ratios, ledger, quotas)
    return finished(ledger, settings, mask, anchors, rows)


def _layer_worth_most(ledger: Ledger, settings: SearchSettings, mask: HeadMask) -> int:
    """The sliding layer whose return to full gives the best score."""

    def worth(layer: int) -> tuple[float, float]:
        whole = mask.with_layer(layer, [True] * mask.num_key_value_heads)
        result = ledger.evaluate(whole, "repair", f"layer {layer}", shared_layers=0)
        return result.score, result.log_likelihood if settings.break_ties else 0.0

    return max((i for i, heads in enumerate(mask.swa_kv_heads) if heads), key=worth)
