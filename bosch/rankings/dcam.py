"""DCAM: the share of a head's attention mass at lags below the window (BOSCH Eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from bosch.rankings.blocks import attention_blocks, local_and_total
from bosch.rankings.capture import LayerStates, summed_terms
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet


def dcam(model: PreTrainedModel, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest."""

    def terms(states: LayerStates) -> Iterator[Tensor]:
        # Eq. 7; both sums of Eq. 8 at once instead of a histogram over lags.
        for begin, end, alpha in attention_blocks(states):
            yield local_and_total(alpha, begin, end, window_size)

    sums = summed_terms(model, calibration, terms)
    return (sums[..., 0] / sums[..., 1]).numpy()  # Eq. 8
