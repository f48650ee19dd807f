"""Stage 1: how much does the score suffer when a layer is localised (BOSCH §2.2.1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.heads import HeadMask, swa_budget
from bosch.loss import Loss
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.method.subproblem import optimise_layers


@dataclass(frozen=True)
class LayerImportance:
    """Score and log-likelihood after each layer was localised, by layer index, and the last mask.

    Layer l's entries were measured with all layers above it already localised. Layers of one of
    the `groups` were localised together and share an entry.
    """

    best_scores: list[float]
    best_log_likelihoods: list[float]
    mask: HeadMask
    groups: list[list[int]]

    def averaged(self, drops: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What a group cost, spread evenly over its layers; nothing changes where it is one."""
        result = drops.copy()
        for group in self.groups:
            result[group] = drops[group].mean()
        return result


def layer_importance(
    ledger: Ledger, settings: SearchSettings, loss: Loss, layers_per_group: int = 1
) -> LayerImportance:
    """Localise ceil(rho H) units of one layer after another, top layer first (Algorithm 1).

    With more `layers_per_group`, neighbouring layers are searched jointly, in groups of equal size
    or nearly so, and ceil(rho |g| H) units of a group g are localised.
    """
    num_layers = ledger.scorer.num_layers
    heads = ledger.scorer.num_key_value_heads
    mask = HeadMask.all_full(num_layers, heads)
    scores, log_likelihoods = [0.0] * num_layers, [0.0] * num_layers
    groups = layer_groups(num_layers, layers_per_group)
    for group in reversed(groups):
        quota = swa_budget(len(group) * heads, settings.swa_ratio)
        solution = optimise_layers(
            ledger, settings, loss, mask, group, quota, "layer_importance", group_name(group)
        )
        mask = solution.mask
        for layer in group:
            scores[layer] = solution.evaluation.score
            log_likelihoods[layer] = solution.evaluation.log_likelihood
    return LayerImportance(scores, log_likelihoods, mask, groups)


def layer_groups(num_layers: int, layers_per_group: int) -> list[list[int]]:
    """Neighbouring layers in groups of at most `layers_per_group`, as equal as they can be."""
    count = -(-num_layers // layers_per_group)
    return [part.tolist() for part in np.array_split(np.arange(num_layers), count)]


def group_name(group: Sequence[int]) -> str:
    """Name of a group of neighbouring layers in logs and traces."""
    return f"layer {group[0]}" if len(group) == 1 else f"layers {group[0]} to {group[-1]}"
