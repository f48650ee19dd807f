"""Proxy: blocks of keys, ranked by a proxy head, that a head needs (BOSCH Eq. 11 to 14).

nB is the number of key blocks, HQ of query heads, R of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from bosch.rankings.blocks import attention_blocks
from bosch.rankings.capture import LayerStates, summed_terms
from bosch.rankings.ranking import Scores
from bosch.score.calibration import CalibrationSet

_MASS = 0.95  # gamma: the fraction of a row to be reached


def proxy(model: PreTrainedModel, calibration: CalibrationSet, window_size: int) -> Scores:
    """Scores [L, HQ] in (0, 1]; the most local head has the smallest.

    A block has an eighth of the window's keys (B); the first query head ranks each layer's blocks.
    """
    size = max(1, window_size // 8)

    def terms(states: LayerStates) -> Iterator[Tensor]:
        for begin, _, alpha in attention_blocks(states):
            yield fractional_budgets(alpha, begin, size).double().sum(dim=-1)

    sums = summed_terms(model, calibration, terms)
    rows = sum(len(example.input_ids) for example in calibration.examples)
    return (sums / rows).numpy()  # Eq. 14


def fractional_budgets(alpha: Tensor, begin: int, key_block: int) -> Tensor:
    """q(t) of the rows from `begin` on, from alpha [HQ, R, n]: [HQ, R] (Eq. 11 to 13)."""
    proxy_mass = _block_sums(alpha[0], key_block)  # Eq. 11
    rows = torch.arange(begin, begin + alpha.shape[1], device=alpha.device)
    counts = rows // key_block + 1  # nB(t), the last block being the row's own
    future = torch.arange(proxy_mass.shape[-1], device=alpha.device) >= counts[:, None]
    ranking = proxy_mass.masked_fill(future, -1).argsort(
        dim=-1, descending=True, stable=True
    )  # Eq. 12
    blocks = _block_sums(alpha, key_block)
    reached = blocks.gather(-1, ranking.expand_as(blocks)).cumsum(dim=-1)
    needed = (reached < _MASS * reached[..., -1:]).sum(dim=-1) + 1  # Eq. 13
    return torch.minimum(needed, counts) / counts


def _block_sums(alpha: Tensor, key_block: int) -> Tensor:
    """Sums over contiguous blocks of keys: [..., n] to [..., nB]."""
    padded = functional.pad(alpha, (0, -alpha.shape[-1] % key_block))
    return padded.reshape(*alpha.shape[:-1], -1, key_block).sum(dim=-1)
