"""DCAM: the share of a head's attention mass at lags below the window (BOSCH Eq. 7 and 8)."""

from __future__ import annotations

from typing import Any

import torch

from bosch.baselines.blocks import attention_blocks, local_and_all
from bosch.baselines.capture import LayerStates, visit_layers
from bosch.baselines.ranking import Scores
from bosch.calibration import CalibrationSet
from bosch.modeling import mask_shape


def dcam(model: Any, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest."""
    layers, _ = mask_shape(model.config)
    sums = torch.zeros(layers, model.config.num_attention_heads, 2, dtype=torch.float64)

    def add(layer: int, states: LayerStates) -> None:
        # Eq. 7; both sums of Eq. 8 at once instead of a histogram over lags.
        blocks = attention_blocks(states)
        parts = [local_and_all(alpha, begin, end, window_size) for begin, end, alpha in blocks]
        sums[layer] += torch.stack(parts).sum(dim=0).cpu()

    for example in calibration.examples:
        visit_layers(model, torch.tensor(example.input_ids), add)
    scores: Scores = (sums[..., 0] / sums[..., 1]).numpy()  # Eq. 8
    return scores
