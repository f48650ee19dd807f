"""Fisher: the share of Fisher-weighted attention mass below the window (BOSCH Eq. 23 to 25)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bosch.baselines.blocks import attention_blocks, grouped_product, local_and_all
from bosch.baselines.capture import LayerStates, query_heads, visit_gradients
from bosch.baselines.ranking import Scores
from bosch.model.search_mode import mask_shape
from bosch.objective.calibration import CalibrationSet


def fisher(model: Any, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest.

    The loss of an example is the mean cross-entropy of its answer tokens. A head whose attention
    has no influence on it at all scores 1.
    """
    layers, _ = mask_shape(model.config)
    sums = torch.zeros(layers, query_heads(model), 2, dtype=torch.float64)

    def add(layer: int, states: LayerStates) -> None:
        gradient = states.output_gradient
        assert gradient is not None
        blocks = attention_blocks(states)
        terms = [
            local_and_all(_saliency(states, gradient, alpha, begin, end), begin, end, window_size)
            for begin, end, alpha in blocks
        ]
        sums[layer] += torch.stack(terms).sum(dim=0).cpu()  # Eq. 24, both sums of Eq. 25 at once

    for example in calibration.examples:
        visit_gradients(model, example, add)
    local, total = sums[..., 0].numpy(), sums[..., 1].numpy()
    scores: Scores = np.divide(local, total, out=np.ones_like(local), where=total != 0)  # Eq. 25
    return scores


def _saliency(states: LayerStates, gradient: Tensor, alpha: Tensor, begin: int, end: int) -> Tensor:
    """Phi of rows begin .. end - 1 (Eq. 23), [HQ, R, end], with dL/dalpha(t, j) = dO_t . V_j."""
    slope = grouped_product(gradient[:, begin:end], states.value[:, :end])
    return slope.mul_(alpha).square_()
