"""Attention by torch's fused kernels: under a mask, and of full heads, which see every key so far.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from bosch.attention.scores import Scores, dense_attention
from bosch.attention.span import Span

# Dense masks up to this many entries are made once per pass; larger ones block by block.
_DENSE_MASK_ENTRIES = 2**24


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention [B, HQ, T, D] of `query` [B, HQ, T, D] to `key`, `value` [B, HKV, Tk, D].

    `mask` is bool and broadcasts to [B, HQ, T, Tk]; `is_causal` needs Tk = T.
    """
    if not scores.is_plain:
        return _unfused(query, key, value, scores, dropout, mask, is_causal)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal,
        scale=scores.scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    dropout: float,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """As `masked_attention`, for scores that no fused kernel makes.

    Few queries at a time, to bound memory.
    """
    rows, heads, length, _ = query.shape
    step = max(16, _DENSE_MASK_ENTRIES // (rows * heads * key.shape[2]))
    outputs = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen, end = None if mask is None else mask[..., start:stop, :], key.shape[2]
        if is_causal:
            end = stop
            slots = torch.arange(stop, device=query.device)
            seen = slots <= slots[start:, None]
        part = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(dense_attention(*part, seen, scores, dropout))
    return torch.cat(outputs, dim=2)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, span: Span, scores: Scores, dropout: float
) -> Tensor:
    """Causal attention over every key, [B, HQ, T, D]; a mask is made only where none can be spared.

    A plain chunk after a past needs none, except on the CPU with gradients or dropout.
    """
    length = key.shape[2]
    fixed = span.start is not None or length != span.kv_length  # all that a cache has room for
    if span.is_plain and not fixed:
        if span.q_length == 1 or span.q_offset == 0:
            return masked_attention(query, key, value, scores, dropout, is_causal=span.q_length > 1)
        found = _after_past(query, key, value, scores, dropout)
        if found is not None:
            return found
    queries = span.query_slots(query.device)
    keys = torch.arange(length, device=query.device)[None]
    rows = 1 if span.is_plain else query.shape[0]
    if fixed or rows * span.q_length * length <= _DENSE_MASK_ENTRIES:
        mask = span.memo(("full", length), lambda: span.visible(queries, keys)[:, None])
        return masked_attention(query, key, value, scores, dropout, mask)
    step = max(64, _DENSE_MASK_ENTRIES // (rows * span.kv_length))
    outputs = []
    for start in range(0, span.q_length, step):
        stop = min(start + step, span.q_length)
        end = span.q_offset + stop
        mask = span.visible(queries[:, start:stop], keys[:, :end])[:, None]
        block = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(masked_attention(*block, scores, dropout, mask))
    return torch.cat(outputs, dim=2)


def _after_past(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout: float
) -> Tensor | None:
    """Causal attention of queries that are the last of the keys; None where no kernel has it."""
    states = (query, key, value)
    if not scores.is_plain or any(x.stride(-1) != 1 for x in states):
        return None
    if query.device.type == "cpu":
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in states)
        return None if dropout or differentiable else _in_two_parts(*states, scores.scaling)
    shared = query.shape[1] != key.shape[1]
    if query.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not can_use_flash_attention(SDPAParams(*states, None, dropout, False, shared)):
        return None  # torch would make a mask of all T x Tk
    return F.scaled_dot_product_attention(
        *states, attn_mask=causal_lower_right(query.shape[2], key.shape[2]), dropout_p=dropout,
        scale=scores.scaling, enable_gqa=shared,
    )  # fmt: skip


def _in_two_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The past, which every query sees whole, and the chunk itself, which is causal: no mask.

    Each part's softmax has its own sum; the sums' logarithms say how much each part weighs.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past = key.shape[2] - query.shape[2]
    before, log_before = kernel(query, key[:, :, :past], value[:, :, :past], scale=scaling)
    within, log_within = kernel(
        query, key[:, :, past:], value[:, :, past:], is_causal=True, scale=scaling
    )
    share = torch.sigmoid(log_before - log_within)[..., None]  # [B, HQ, T, 1]
    return torch.lerp(within.to(share.dtype), before.to(share.dtype), share).to(query.dtype)
