"""Overlapping key bands as views: block i of C queries reads keys i*C .. i*C + C + W - 1.

Shapes: H heads (of one or more rows), n blocks of C queries, W window, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Bands(torch.autograd.Function):
    """Forward is a view without copies; backward adds the overlapping pieces slice by slice.

    Autograd's own backward of an overlapping view goes element by element, which costs more than
    the attention itself.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, block: int, width: int) -> Tensor:
        ctx.length, ctx.block, ctx.width = keys.shape[1], block, width
        return _view(keys, block, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        block, width = ctx.block, ctx.width
        n, heads, _, dim = grad.shape
        # Whole blocks for the last piece too: torch.compile gets views with gaps wrong.
        starts = range(0, width, block)
        total = grad.new_zeros(heads, starts[-1] + n * block, dim)
        for start in starts:
            piece = grad[:, :, start : start + block].transpose(0, 1)  # [H, n, <= C, D]
            room = total[:, start : start + n * block].view(heads, n, block, dim)
            room[:, :, : piece.shape[2]].add_(piece)
        return total[:, : ctx.length], None, None


def _view(keys: Tensor, block: int, width: int) -> Tensor:
    return keys.unfold(1, width, block).permute(1, 0, 3, 2)


def bands(keys: Tensor, block: int, window: int) -> Tensor:
    """Keys [H, n*C + W, D] as bands [n, H, C + W, D]; a view, differentiable."""
    width = block + window
    if keys.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Bands.apply(keys, block, width)  # type: ignore[no-untyped-call]
        return result
    return _view(keys, block, width)
