"""flash-attn's two functions as documented, in plain torch, in any dtype.

`install` makes the GPU backends call them.

Query i of Tq sees key j of Tk where i' - left <= j <= i' + right, with i' = i + Tk - Tq. -1 is no
bound; `causal` makes right 0. Shapes: [B, T, H, D]; [total, H, D] with the int32 borders of
sequences.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen

from bosch import attention
from bosch.attention import flex


def install(patch: pytest.MonkeyPatch) -> None:
    """Run flash and varlen by this module, and flex uncompiled, in small blocks."""
    patch.setattr(flex, "FLEX_BLOCK", 16)
    patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr(
        torch_flex, "_validate_device", lambda *states: None
    )  # it refuses gradients on a CPU
    patch.setitem(sys.modules, "flash_attn", sys.modules[__name__])
    patch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    # Rounding would hide errors.
    patch.setattr(attention, "HALF_DTYPES", (torch.float64, torch.float32))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert q.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
    assert q.shape[2] % k.shape[2] == 0 and q.stride(-1) == k.stride(-1) == 1
    left, right = window_size
    visible = _visible(q, k, left, 0 if causal else right)
    assert bool(visible.any(1).all())
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, dim=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights, v).contiguous()


def _visible(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    """The keys that each query sees, [Tq, Tk]."""
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])[None]
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if left >= 0:
        visible &= columns >= rows - left
    if right >= 0:
        visible &= columns <= rows + right
    return visible


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert q.ndim == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(ends_q) == len(ends_k) and ends_q[0] == ends_k[0] == 0
    assert ends_q[-1] == q.shape[0] and ends_k[-1] == k.shape[0]
    outputs = []
    for sequence in range(len(ends_q) - 1):
        queries = slice(ends_q[sequence], ends_q[sequence + 1])
        keys = slice(ends_k[sequence], ends_k[sequence + 1])
        assert 0 < queries.stop - queries.start <= max_seqlen_q
        assert 0 < keys.stop - keys.start <= max_seqlen_k
        part = (q[None, queries], k[None, keys], v[None, keys])
        outputs.append(flash_attn_func(*part, dropout_p, softmax_scale, causal, window_size)[0])
    return torch.cat(outputs)


def varlen_attn(*states: Any, scale: float, window_size: Any, enable_gqa: bool) -> Any:
    """torch's varlen attention, as documented."""
    query, key = states[:2]
    assert query.shape[1] == key.shape[1] or enable_gqa
    return flash_attn_varlen_func(*states, softmax_scale=scale, window_size=window_size)
