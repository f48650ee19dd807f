"""Attention probabilities by blocks of query rows: memory grows with T, not with T * T.

Shapes: T tokens, HQ query heads, HKV key/value heads, D head dimension, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bosch.rankings.capture import LayerStates

ROWS = 128


def row_blocks(length: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Bounds (begin, end) of the blocks of rows first .. length - 1."""
    for begin in range(first, length, ROWS):
        yield begin, min(begin + ROWS, length)


def grouped_product(query: Tensor, key: Tensor) -> Tensor:
    """query [HQ, R, D] by its KV head's key [HKV, n, D]: [HQ, R, n]; half precision in float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads, rows, width = query.shape
    query = query.to(dtype).reshape(key.shape[0], -1, width)
    product = query @ key.to(dtype).transpose(1, 2)
    return product.reshape(heads, rows, -1)


def block_scores(states: LayerStates, begin: int, end: int, first_key: int = 0) -> Tensor:
    """Scaled and capped scores of rows begin .. end - 1 for keys first_key .. end - 1.

    Scores of future keys are -inf. Returns [HQ, end - begin, end - first_key].
    """
    scores = grouped_product(states.query[:, begin:end], states.key[:, first_key:end])
    scores *= states.transform.scaling
    if (cap := states.transform.softcap) is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    return scores.masked_fill_(lags(begin, end, first_key, scores.device) < 0, float("-inf"))


def lags(begin: int, end: int, first_key: int, device: torch.device) -> Tensor:
    """d = t - j of rows begin .. end - 1 and keys first_key .. end - 1: [R, n]."""
    rows = torch.arange(begin, end, device=device)[:, None]
    return rows - torch.arange(first_key, end, device=device)


def attention_rows(states: LayerStates, begin: int, end: int) -> Tensor:
    """alpha of rows begin .. end - 1, [HQ, R, end]; extra logits are part of the softmax."""
    scores, extra = block_scores(states, begin, end), states.transform.head_logits
    if extra is None:
        return scores.softmax(dim=-1)
    extra = extra.to(scores.dtype)[:, None, None].expand(-1, end - begin, 1)
    return torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]


def attention_blocks(states: LayerStates) -> Iterator[tuple[int, int, Tensor]]:
    """(begin, end, alpha [HQ, end - begin, end]) for all rows in order."""
    for begin, end in row_blocks(states.query.shape[1]):
        yield begin, end, attention_rows(states, begin, end)


def alpha_gradients(states: LayerStates, begin: int, end: int) -> Tensor:
    """dL/dalpha(t, j) = dL/dO_t . V_j of rows begin .. end - 1: [HQ, R, end]."""
    assert states.output_gradient is not None
    return grouped_product(states.output_gradient[:, begin:end], states.value[:, :end])


def local_and_total(weights: Tensor, begin: int, end: int, window_size: int) -> Tensor:
    """Sums of weights [HQ, R, end] at lags below W and at all lags: [HQ, 2] in float64."""
    local = lags(begin, end, 0, weights.device) < window_size
    inside = (weights * local).sum(dim=-1).double().sum(dim=-1)
    return torch.stack([inside, weights.sum(dim=-1).double().sum(dim=-1)], dim=-1)
