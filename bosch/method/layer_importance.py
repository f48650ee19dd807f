"""Stage 1: how much does the score suffer when a layer is localised (BOSCH §2.2.1, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from bosch.heads import HeadMask, swa_budget
from bosch.loss import Loss
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.method.subproblem import optimise_layers


@dataclass(frozen=True)
class LayerImportance:
    """Score and log-likelihood after each layer was localised, by layer index, and the last mask.

    Layer l's entries were measured with all layers above it already localised.
    """

    best_scores: list[float]
    best_log_likelihoods: list[float]
    mask: HeadMask


def layer_importance(ledger: Ledger, settings: SearchSettings, loss: Loss) -> LayerImportance:
    """Localise ceil(rho H) units of one layer after another, top layer first (Algorithm 1)."""
    num_layers = ledger.scorer.num_layers
    heads = ledger.scorer.num_key_value_heads
    quota = swa_budget(heads, settings.swa_ratio)
    mask = HeadMask.all_full(num_layers, heads)
    scores, log_likelihoods = [0.0] * num_layers, [0.0] * num_layers
    for layer in reversed(range(num_layers)):
        solution = optimise_layers(
            ledger, settings, loss, mask, [layer], quota, "layer_importance", f"layer {layer}"
        )
        mask = solution.mask
        scores[layer] = solution.evaluation.score
        log_likelihoods[layer] = solution.evaluation.log_likelihood
    return LayerImportance(scores, log_likelihoods, mask)
