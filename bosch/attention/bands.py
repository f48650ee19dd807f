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
        total = grad.new_zeros(heads, ctx.length, dim)
        for start in range(0, width, block):
            piece = grad[:, :, start : start + block].transpose(0, 1)  # [H, n, <= C, D]
            room = total[:, start : start + (n - 1) * block + piece.shape[2]]
            if piece.shape[2] == block:
                room.view(heads, n, block, dim).add_(piece)
            else:
                strides = (total.stride(0), block * dim, dim, 1)
                room.as_strided(piece.shape, strides, room.storage_offset()).add_(piece)
        return total, None, None


def _view(keys: Tensor, block: int, width: int) -> Tensor:
    return keys.unfold(1, width, block).permute(1, 0, 3, 2)


def bands(keys: Tensor, block: int, window: int) -> Tensor:
    """Keys [H, n*C + W, D] as bands [n, H, C + W, D]; a view, differentiable."""
    width = block + window
    if keys.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Bands.apply(keys, block, width)  # type: ignore[no-untyped-call]
        return result
    return _view(keys, block, width)
