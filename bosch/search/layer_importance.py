"""BOSCH §2.2.1, Algorithm 1: how much the score suffers when a layer is localised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.search.evaluator import Evaluator
from bosch.search.groups import layer_groups
from bosch.search.loss import Loss
from bosch.search.settings import SearchSettings
from bosch.search.subproblem import optimise_layers


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
        """Drops with each group's spread evenly over its layers."""
        result = drops.copy()
        for group in self.groups:
            result[group] = drops[group].mean()
        return result


def layer_importance(
    evaluator: Evaluator, settings: SearchSettings, loss: Loss, layers_per_group: int = 1
) -> LayerImportance:
    """Localise ceil(rho H) units of one layer after another, top layer first (Algorithm 1).

    With more `layers_per_group`, neighbouring layers are searched jointly, in groups of equal size
    or nearly so, and ceil(rho |g| H) units of a group g are localised.
    """
    num_layers, units = evaluator.shape
    mask = HeadMask.all_full(num_layers, units)  # line 3
    scores, log_likelihoods = [0.0] * num_layers, [0.0] * num_layers
    groups = layer_groups(num_layers, layers_per_group)
    for group in reversed(groups):  # line 4
        quota = swa_budget(len(group) * units, settings.swa_ratio)
        solution = optimise_layers(
            evaluator, settings, loss, mask, group, quota, "layer_importance", group_name(group)
        )  # lines 5 to 7
        mask = solution.mask
        for layer in group:
            scores[layer] = solution.evaluation.score  # line 8
            log_likelihoods[layer] = solution.evaluation.log_likelihood
    return LayerImportance(scores, log_likelihoods, mask, groups)  # line 9


def group_name(group: Sequence[int]) -> str:
    """Name of a group of neighbouring layers in logs and traces."""
    return f"layer {group[0]}" if len(group) == 1 else f"layers {group[0]} to {group[-1]}"
