"""Fisher: the share of Fisher-weighted attention mass below the window (BOSCH Eq. 23 to 25)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from bosch.rankings.blocks import alpha_gradients, attention_blocks, local_and_total
from bosch.rankings.capture import LayerStates, summed_terms
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet


def fisher(model: PreTrainedModel, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest.

    The loss is the mean cross-entropy of an answer's tokens; a head without influence scores 1.
    """

    def terms(states: LayerStates) -> Iterator[Tensor]:
        for begin, end, alpha in attention_blocks(states):
            gradients = alpha_gradients(states, begin, end)
            saliency = gradients.mul_(alpha).square_()  # Eq. 23, [HQ, R, end]
            yield local_and_total(saliency, begin, end, window_size)

    # Eq. 24, both sums of Eq. 25 at once
    sums = summed_terms(model, calibration, terms, by_gradient=True)
    local, total = sums[..., 0].numpy(), sums[..., 1].numpy()
    return np.divide(local, total, out=np.ones_like(local), where=total != 0)  # Eq. 25
