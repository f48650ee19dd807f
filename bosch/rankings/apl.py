"""APL: how far from the last answer token a head's attention peaks (BOSCH Eq. 9 and 10)."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from bosch.model.search_mode import mask_shape
from bosch.rankings.blocks import block_scores
from bosch.rankings.capture import LayerStates, query_heads, visit_layers
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet


def apl(model: PreTrainedModel, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest.

    The query is that of the last answer token, not of the token that predicts it. Of equal peaks
    the first counts; the median of an even number of examples is the mean of the middle two.
    """
    layers, _ = mask_shape(model.config)
    lags = np.zeros((len(calibration), layers, query_heads(model)))
    for index, example in enumerate(calibration.examples):
        last = len(example.input_ids) - 1  # t*, the last answer token

        def peak(layer: int, states: LayerStates, index: int = index, last: int = last) -> None:
            row = block_scores(states, last, last + 1)[:, 0]  # softmax keeps the order
            lags[index, layer] = (last - row.argmax(dim=-1)).cpu().numpy()  # Eq. 9

        visit_layers(model, torch.tensor(example.input_ids), peak)
    return 1 - np.minimum(1, np.median(lags, axis=0) / window_size)  # Eq. 10
