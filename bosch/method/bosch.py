"""The whole procedure: from a scorer to a head mask on budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bosch.evaluation_log import Evaluation
from bosch.heads import HeadMask, swa_budget
from bosch.loss import Anchors, Loss
from bosch.method.head_selection import head_selection
from bosch.method.layer_importance import LayerImportance, layer_importance
from bosch.method.ledger import Ledger
from bosch.method.ratio_assignment import LayerRatios, assign_ratios, layer_drops
from bosch.method.settings import SearchSettings


@dataclass(frozen=True)
class SearchResult:
    """A head mask on budget, its evaluation, the anchors and what stages 1 and 2 found."""

    mask: HeadMask
    evaluation: Evaluation
    anchors: Anchors
    layers: list[dict[str, float]] = field(default_factory=list)


def bosch(ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """BOSCH: layer importance, adaptive ratios, joint head selection (Algorithms 1 to 3).

    The mask has exactly ceil(rho N) sliding units. Raises UserError when the anchors leave nothing
    to search for.
    """
    anchors, loss = prepared(ledger, settings)
    importance = layer_importance(ledger, settings, loss)
    ratios = ranked_layers(ledger, settings, importance, anchors)
    mask = head_selection(ledger, settings, loss, ratios.quotas)
    return finished(ledger, settings, mask, anchors, layer_rows(importance, ratios, ledger))


def finished(
    ledger: Ledger,
    settings: SearchSettings,
    mask: HeadMask,
    anchors: Anchors,
    layers: list[dict[str, float]] | None = None,
) -> SearchResult:
    """Check the budget of the final mask and make sure that its score is known."""
    sliding = int((~mask.is_full).sum())
    wanted = swa_budget(mask.is_full.size, settings.swa_ratio)
    assert sliding == wanted, f"{sliding} units sliding, {wanted} wanted"
    evaluation = ledger.evaluate(mask, "final", "final mask")
    return SearchResult(mask, evaluation, anchors, layers or [])


def prepared(ledger: Ledger, settings: SearchSettings) -> tuple[Anchors, Loss]:
    """Anchors and loss of a search; raises UserError when there is nothing to search for."""
    anchors = ledger.anchors()
    anchors.check()
    if settings.break_ties:
        ledger.note("masks of equal score were told apart by the answers' log-likelihood")
    return anchors, Loss(anchors, settings.alpha, settings.gamma)


def ranked_layers(
    ledger: Ledger, settings: SearchSettings, importance: LayerImportance, anchors: Anchors
) -> LayerRatios:
    """Stage 2, with a note when the scores of stage 1 do not rank the layers."""
    drops = importance.averaged(
        layer_drops(importance.best_scores, anchors.all_full, anchors.all_full)
    )
    tie_drops = None
    if settings.break_ties:
        full = HeadMask.all_full(ledger.scorer.num_layers, ledger.scorer.num_key_value_heads)
        original = ledger.log.get(full)
        assert original is not None
        tie_drops = importance.averaged(
            layer_drops(importance.best_log_likelihoods, original.log_likelihood, scale=1.0)
        )
    _note_ties(ledger, drops, importance.groups, settings.break_ties)
    return assign_ratios(
        drops, ledger.scorer.num_key_value_heads, settings.swa_ratio, settings.buckets, tie_drops
    )


def _note_ties(
    ledger: Ledger, drops: np.ndarray, groups: Sequence[Sequence[int]], break_ties: bool
) -> None:
    """Say when the drops do not tell all groups of stage 1 (by default layers) from each other."""
    found = np.round(drops[[group[0] for group in groups]], 12)
    values, counts = np.unique(found, return_counts=True)
    tied = int(counts[counts > 1].sum())
    if tied == 0:
        return
    name = "layers" if len(groups) == len(drops) else "groups of layers"
    who = f"all {name}" if len(values) == 1 else f"{tied} of {len(groups)} {name}"
    how = "their log-likelihoods rank them" if break_ties else "their ranking is arbitrary"
    ledger.note(f"stage 1 found the same drop of the score for {who}: {how}")


def layer_rows(
    importance: LayerImportance,
    ratios: LayerRatios,
    ledger: Ledger,
    quotas: Sequence[int] | None = None,
) -> list[dict[str, float]]:
    """One record per layer for the summary: what stage 1 measured and stage 2 made of it."""
    heads = ledger.scorer.num_key_value_heads
    return [
        {
            "layer": layer,
            "best_score": importance.best_scores[layer],
            "best_log_likelihood": importance.best_log_likelihoods[layer],
            "drop": ratios.drops[layer],
            "weight": ratios.weights[layer],
            "ratio": quota / heads,
        }
        for layer, quota in enumerate(quotas or ratios.quotas)
    ]
