"""torch's varlen attention as documented, in plain torch, in any dtype.

`install` makes the GPU backends call it.

Query i of Tq sees key j of Tk where i' - left <= j <= i' + right, with i' = i + Tk - Tq. -1 is no
bound. Shapes: [total, H, D] with the int32 borders of sequences.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen

from bosch import attention
from bosch.attention import flex


def install(patch: pytest.MonkeyPatch) -> None:
    """Run varlen by this module, and flex uncompiled, in small blocks."""
    patch.setattr(flex, "FLEX_BLOCK", 16)
    patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr(
        torch_flex, "_validate_device", lambda *states: None
    )  # it refuses gradients on a CPU
    patch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    # Rounding would hide errors.
    patch.setattr(attention, "HALF_DTYPES", (torch.float64, torch.float32))


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


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    assert q.ndim == 3 and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert q.shape[1] == k.shape[1] or enable_gqa
    ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert len(ends_q) == len(ends_k) and ends_q[0] == ends_k[0] == 0
    assert ends_q[-1] == q.shape[0] and ends_k[-1] == k.shape[0] == v.shape[0]
    heads, outputs = q.shape[1] // k.shape[1], []
    for sequence in range(len(ends_q) - 1):
        queries = slice(ends_q[sequence], ends_q[sequence + 1])
        keys = slice(ends_k[sequence], ends_k[sequence + 1])
        assert 0 < queries.stop - queries.start <= max_q
        assert 0 < keys.stop - keys.start <= max_k
        visible = _visible(q[None, queries], k[None, keys], *window_size)
        assert bool(visible.any(1).all())
        key, value = (x[keys].repeat_interleave(heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[queries], key) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, value))
    return torch.cat(outputs)
