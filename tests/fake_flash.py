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
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        patch.setitem(sys.modules, name, sys.modules[__name__])
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
    return_attn_probs: bool = False,
) -> Any:
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
    out = torch.einsum("bhij,bjhd->bihd", weights, v).contiguous()
    return (out, scores.logsumexp(-1), None) if return_attn_probs else out


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
    return_attn_probs: bool = False,
) -> Any:
    assert q.ndim == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(ends_q) == len(ends_k) and ends_q[0] == ends_k[0] == 0
    assert ends_q[-1] == q.shape[0] and ends_k[-1] == k.shape[0]
    outputs, sums = [], []
    for sequence in range(len(ends_q) - 1):
        queries = slice(ends_q[sequence], ends_q[sequence + 1])
        keys = slice(ends_k[sequence], ends_k[sequence + 1])
        assert 0 < queries.stop - queries.start <= max_seqlen_q
        assert 0 < keys.stop - keys.start <= max_seqlen_k
        part = (q[None, queries], k[None, keys], v[None, keys])
        out, lse, _ = flash_attn_func(*part, dropout_p, softmax_scale, causal, window_size, True)
        outputs.append(out[0])
        sums.append(lse[0])
    out = torch.cat(outputs)
    return (out, torch.cat(sums, dim=1), None) if return_attn_probs else out


def varlen_attn(*states: Any, scale: float, window_size: Any, enable_gqa: bool) -> Any:
    """torch's varlen attention, as documented."""
    query, key = states[:2]
    assert query.shape[1] == key.shape[1] or enable_gqa
    return flash_attn_varlen_func(*states, softmax_scale=scale, window_size=window_size)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    borders: tuple[Tensor, Tensor] | None,
    softmax_scale: float,
    window_size: tuple[int, int],
) -> None:
    """Gradients as the kernels compute them: from the output and the log-sum-exp they are given.

    exp(s - lse) are the weights P, and dS = P (dP - rowsum(dO O)).
    """
    if borders is not None:
        ends_q, ends_k = (ends.tolist() for ends in borders)
        for n in range(len(ends_q) - 1):
            queries, keys = (slice(ends[n], ends[n + 1]) for ends in (ends_q, ends_k))
            backward(
                dout[None, queries],
                q[None, queries],
                k[None, keys],
                v[None, keys],
                out[None, queries],
                softmax_lse[None, :, queries],
                dq[None, queries],
                dk[None, keys],
                dv[None, keys],
                None,
                softmax_scale,
                window_size,
            )
        return
    left, right = window_size
    visible = _visible(q, k, left, max(0, right))
    heads = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(heads, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * softmax_scale
    weights = torch.exp(scores - softmax_lse[..., None]).masked_fill(~visible, 0.0)
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    score_grads = weights * (torch.einsum("bihd,bjhd->bhij", dout, values) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", score_grads, keys))
    key_grads = torch.einsum("bhij,bihd->bjhd", score_grads, q)
    value_grads = torch.einsum("bhij,bihd->bjhd", weights, dout)
    for result, repeated in ((dk, key_grads), (dv, value_grads)):
        result.copy_(repeated.unflatten(2, (k.shape[2], heads)).sum(3))


def _flash_attn_backward(
    *states: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> None:
    """The backward pass of both functions.

    `states` are dO, Q, K, V, O, lse, dQ, dK, dV and, for the varlen function, the borders and the
    longest lengths of queries and keys.
    """
    assert causal and not dropout_p and not softcap and states[1].shape[-1] % 8 == 0
    borders = states[9:11] or None
    backward(*states[:9], borders, softmax_scale, (window_size_left, window_size_right))


_flash_attn_varlen_backward = _flash_attn_backward
