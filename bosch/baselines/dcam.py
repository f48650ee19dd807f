"""DCAM: the share of a head's attention mass at lags below the window (BOSCH Eq. 7 and 8)."""

from __future__ import annotations

from typing import Any

import torch

from bosch.baselines.blocks import attention_blocks, local_and_all
from bosch.baselines.capture import LayerStates, query_heads, visit_layers
from bosch.baselines.ranking import Scores
from bosch.model.search_mode import mask_shape
from bosch.objective.calibration import CalibrationSet


def dcam(model: Any, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest."""
    layers, _ = mask_shape(model.config)
    sums = torch.zeros(layers, query_heads(model), 2, dtype=torch.float64)

    def add(layer: int, states: LayerStates) -> None:
        # Eq. 7; both sums of Eq. 8 at once instead of a histogram over lags.
        blocks = attention_blocks(states)
        terms = [local_and_all(alpha, begin, end, window_size) for begin, end, alpha in blocks]
        sums[layer] += torch.stack(terms).sum(dim=0).cpu()

    for example in calibration.examples:
        visit_layers(model, torch.tensor(example.input_ids), add)
    scores: Scores = (sums[..., 0] / sums[..., 1]).numpy()  # Eq. 8
    return scores
