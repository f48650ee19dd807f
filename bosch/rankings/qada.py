"""QAdA: local softmax mass against a Gaussian estimate of the rest (BOSCH Eq. 15 to 19).

HQ query heads, R rows of a block, n keys of the block's band.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.rankings.blocks import block_scores, lags, row_blocks
from bosch.rankings.capture import LayerStates, summed_terms
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet


def qada(model: PreTrainedModel, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in [0, 1]; the most local head has the largest.

    The keys just outside the window (B, an eighth of its size) represent all keys outside. Queries
    and keys are those that enter the softmax. A block of rows reads only its window and buffer, so
    memory does not grow with the square of the length.
    """
    buffer = max(1, window_size // 8)

    def terms(states: LayerStates) -> Iterator[Tensor]:
        for begin, end in row_blocks(states.query.shape[1]):
            fractions = _local_fractions(states, begin, end, window_size, buffer)
            yield fractions.double().sum(dim=-1)

    sums = summed_terms(model, calibration, terms)
    rows = sum(len(example.input_ids) for example in calibration.examples)
    return (sums / rows).numpy()  # Eq. 19


def _local_fractions(
    states: LayerStates, begin: int, end: int, window_size: int, buffer: int
) -> Tensor:
    """pi(t) of rows begin .. end - 1, [HQ, R] (Eq. 15 to 18).

    q.mu and q.Sigma.q are mean and variance of the buffer's scores, without a covariance matrix of
    keys. All sums are in logarithms.
    """
    first_key = max(0, begin - window_size - buffer + 1)
    scores = block_scores(states, begin, end, first_key)
    distance = lags(begin, end, first_key, scores.device)
    outside = distance >= window_size
    log_local = scores.masked_fill(outside, float("-inf")).logsumexp(dim=-1)  # Eq. 15 and 16
    in_buffer = outside & (distance < window_size + buffer)
    count = in_buffer.sum(dim=-1).clamp(min=1)
    mean = scores.masked_fill(~in_buffer, 0).sum(dim=-1) / count
    deviations = (scores - mean[..., None]).masked_fill(~in_buffer, 0)
    variance = deviations.square().sum(dim=-1) / count
    keys_outside = (torch.arange(begin, end, device=scores.device) - window_size + 1).clamp(min=0)
    log_global = keys_outside.log() + mean + variance / 2  # Eq. 17; -inf where no key is outside
    return torch.sigmoid(log_local - log_global)  # Eq. 18
