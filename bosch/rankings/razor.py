"""Razor: echo and induction attention on a repeated random block (BOSCH Eq. 20 to 22)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.model.search_mode import mask_shape
from bosch.rankings.blocks import block_scores, row_blocks
from bosch.rankings.capture import LayerStates, query_heads, visit_layers
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet

_REPEATS = 4


def razor(
    model: PreTrainedModel, calibration: CalibrationSet, window_size: int, *, seed: int = 0
) -> Scores:
    """Scores [L, HQ]; the most local head has the smallest. They do not depend on the window.

    The probe repeats a block of K random tokens four times; K is a quarter of the longest
    calibration example. Induction looks at key m - K + 1, the token after the earlier occurrence
    (Eq. 20 prints m - K - 1).
    """
    layers, _ = mask_shape(model.config)
    length = max(2, calibration.max_length // _REPEATS)
    vocabulary = len(next(model.get_input_embeddings().parameters()))
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(vocabulary, (length,), generator=generator)
    means = torch.zeros(2, layers, query_heads(model), dtype=torch.float64)

    def measure(layer: int, states: LayerStates) -> None:
        means[:, layer] = mean_attention(states, length).cpu()

    visit_layers(model, block.repeat(_REPEATS), measure)
    echo, induction = means.numpy()
    return np.maximum(_z_scores(echo), _z_scores(induction))  # Eq. 22


def mean_attention(states: LayerStates, block_length: int) -> Tensor:
    """Means over rows m of alpha(m, m - K) and alpha(m, m - K + 1) on the probe: [2, HQ] (Eq. 21).

    Only two entries and the log-sum-exp of a row are stored.
    """
    total = states.query.shape[1]
    sums = torch.zeros(2, len(states.query), dtype=torch.float64, device=states.query.device)
    for begin, end in row_blocks(total, first=block_length):
        scores = block_scores(states, begin, end)
        log_sum = scores.logsumexp(dim=-1)  # [HQ, R]
        if (extra := states.transform.head_logits) is not None:
            log_sum = torch.logaddexp(log_sum, extra.to(log_sum.dtype)[:, None])
        rows = torch.arange(begin, end, device=scores.device)
        for offset in (0, 1):
            keys = rows - block_length + offset  # Eq. 20
            picked = scores.gather(-1, keys.expand(len(scores), -1)[..., None])[..., 0]
            sums[offset] += (picked - log_sum).exp().double().sum(dim=-1)
    return sums / (total - block_length)  # Eq. 21


def _z_scores(values: Scores) -> Scores:
    """Z-scores over all heads of the model; all zero if the values are equal."""
    if values.min() == values.max():  # rounding would leave a deviation above 0
        return np.zeros_like(values)
    return (values - values.mean()) / values.std()
