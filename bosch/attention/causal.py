"""Attention with torch's fused kernels: with a mask, and causal attention of full heads.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from bosch.attention.call import GroupCall
from bosch.attention.context import AttentionContext
from bosch.attention.kernels import fused_attention
from bosch.attention.logit_transform import LogitTransform, dense_attention

# From this many queries on, rows padded on the left go one by one; below, one mask is faster.
MIN_PADDED = 128
# Dense masks up to this many entries are made once per pass; larger ones block by block.
DENSE_MASK_ENTRIES = 2**24


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transform: LogitTransform,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention [B, HQ, T, D] of `query` [B, HQ, T, D] to `key`, `value` [B, HKV, Tk, D].

    `mask` is bool and broadcasts to [B, HQ, T, Tk]; `is_causal` needs Tk = T.
    """
    if not transform.is_plain:
        # Special families' logits are computed densely, equal to transformers' to the bit.
        return _unfused(query, key, value, transform, dropout, mask, is_causal)
    return fused_attention(
        query, key, value, mask=mask, dropout=dropout, is_causal=is_causal,
        scale=transform.scaling,
    )  # fmt: skip


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transform: LogitTransform,
    dropout: float,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """As `masked_attention`, a few queries at a time, for logits that no fused kernel supports."""
    rows, heads, length, _ = query.shape
    step = max(16, DENSE_MASK_ENTRIES // (rows * heads * key.shape[2]))
    outputs = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        end = key.shape[2]
        visible = None if mask is None else mask[..., start:stop, :]
        if is_causal:
            end = stop
            slots = torch.arange(stop, device=query.device)
            visible = slots <= slots[start:, None]
        states = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(dense_attention(*states, visible, transform, dropout))
    return torch.cat(outputs, dim=2)


def causal_attention(call: GroupCall) -> Tensor:
    """Causal attention over all keys, [B, HQ, T, D]; makes a mask only if it is needed."""
    query, key, value, context = call.query, call.key, call.value, call.context
    options, length = (call.transform, call.dropout), key.shape[2]
    # The keys are a cache of fixed size, with slots that are still empty.
    fixed = context.start is not None or length != context.kv_length
    if context.is_plain and not fixed:
        if context.q_length == 1 or context.q_offset == 0:
            return masked_attention(query, key, value, *options, is_causal=context.q_length > 1)
        out = attention_after_past(query, key, value, *options)
        if out is not None:
            return out
    if not fixed and not torch.compiler.is_compiling():
        if context.document is not None and context.valid is None:
            return _attend_parts(call, context.document_lengths())
        padding = context.left_padding() if context.q_length >= MIN_PADDED else None
        if padding is not None:
            return _attend_parts(call, [[slots, context.kv_length - slots] for slots in padding])
    queries = context.query_slots(query.device)
    keys = torch.arange(length, device=query.device)[None]
    rows = 1 if context.is_plain else query.shape[0]
    if fixed or rows * context.q_length * length <= DENSE_MASK_ENTRIES:
        mask = context.memo(("full", length), lambda: context.visible(queries, keys)[:, None])
        return masked_attention(query, key, value, *options, mask)
    step = max(64, DENSE_MASK_ENTRIES // (rows * context.kv_length))
    outputs = []
    for start in range(0, context.q_length, step):
        stop = min(start + step, context.q_length)
        end = context.q_offset + stop
        mask = context.visible(queries[:, start:stop], keys[:, :end])[:, None]
        block = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(masked_attention(*block, *options, mask))
    return torch.cat(outputs, dim=2)


def _attend_parts(call: GroupCall, parts: list[list[int]]) -> Tensor:
    """Causal attention within each part of a row, [B, HQ, T, D], and none between parts.

    `parts`: tokens of each row's documents, or of its padding and the rest; they need no mask.
    """
    rows, offset = [], call.context.q_offset
    for number, lengths in enumerate(parts):
        row, outputs, start = slice(number, number + 1), [], 0
        for length in lengths:
            stop, first = start + length, max(start, offset)
            if first < stop:  # an earlier document may have keys only
                part = call._replace(
                    query=call.query[row, :, first - offset : stop - offset],
                    key=call.key[row, :, start:stop],
                    value=call.value[row, :, start:stop],
                    context=AttentionContext(stop - first, first - start),
                )
                outputs.append(causal_attention(part))
            start = stop
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)


def attention_after_past(
    query: Tensor, key: Tensor, value: Tensor, transform: LogitTransform, dropout: float
) -> Tensor | None:
    """Causal attention of the last tokens to all keys; None if no kernel supports it."""
    states = (query, key, value)
    if not transform.is_plain or any(x.stride(-1) != 1 for x in states):
        return None
    shared = query.shape[1] != key.shape[1]
    if query.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not can_use_flash_attention(SDPAParams(*states, None, dropout, False, shared)):
        return None  # torch would make a mask of all T x Tk
    return fused_attention(
        *states, mask=causal_lower_right(query.shape[2], key.shape[2]), dropout=dropout,
        scale=transform.scaling,
    )  # fmt: skip
