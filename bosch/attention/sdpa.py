"""Attention of both kinds of heads by torch's scaled_dot_product_attention: CPU and fallback.

Shapes: B batch, T queries, HQ query heads, D head dimension, W window. Full heads take one
causal call. Sliding heads are cut into blocks of C queries that see a band of C + W keys, so that
their cost grows linearly in T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.attention.bands import bands
from bosch.attention.causal import causal_attention, masked_attention
from bosch.attention.layout import (
    CachedStates,
    HeadLayout,
    SlidingStates,
    gather_sinks,
    split_states,
)
from bosch.attention.scores import Scores
from bosch.attention.span import Span

_MAX_BLOCK = 128


def sdpa_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of both kinds of heads: [B, T, HQ, D]."""
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    no_difference = not layout.sliding or span.kv_length <= layout.window_size
    if no_difference and isinstance(key, Tensor) and isinstance(value, Tensor):
        out = causal_attention(query, key, value, span, scores, dropout)
        return out.transpose(1, 2).contiguous()
    full, sliding = split_states(key, value, layout)
    out_full = out_sliding = None
    if full is not None:
        query_full = layout.heads_of(query, "full", q_per_kv)
        full_scores = scores.of(layout, "full", q_per_kv)
        out_full = causal_attention(query_full, full.key, full.value, span, full_scores, dropout)
    if sliding is not None:
        query_sliding = layout.heads_of(query, "sliding", q_per_kv)
        sliding_scores = scores.of(layout, "sliding", q_per_kv)
        out_sliding = _sliding(query_sliding, sliding, layout, span, sliding_scores, dropout)
    return layout.merge(out_full, out_sliding, q_per_kv)


def _trim(states: SlidingStates, span: Span, window: int, sinks: int) -> SlidingStates:
    """Drop keys that no query of this pass sees; sinks among them are kept aside."""
    needed = window - 1 + span.q_length
    key, value = states.key, states.value
    if key.shape[2] <= needed:
        return states
    recent = SlidingStates(key[:, :, -needed:], value[:, :, -needed:])
    if sinks:
        recent.sink_key = gather_sinks(key, states.sink_key, span, sinks)
        recent.sink_value = gather_sinks(value, states.sink_value, span, sinks)
    return recent


def _sliding(
    query: Tensor,
    states: SlidingStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float,
) -> Tensor:
    """Sliding-window attention, [B, HQ_sliding, T, D]."""
    window, sinks = layout.window_size, layout.sinks
    if span.start is not None or states.slots is not None:
        return _sliding_dense(query, states, layout, span, scores, dropout)
    states = _trim(states, span, window, sinks)
    first = span.kv_length - states.key.shape[2]
    if first == 0 and span.kv_length <= window:
        return causal_attention(query, states.key, states.value, span, scores, dropout)
    block = block_size(window)
    if span.q_length < block:
        return _sliding_dense(query, states, layout, span, scores, dropout)
    if span.is_plain and not sinks and span.q_offset == 0:
        return _banded_prefill(query, states, span, window, block, scores, dropout)
    rows = [
        _banded_row(
            query[row : row + 1], _row(states, row), layout, span, row, block, scores, dropout
        )
        for row in range(query.shape[0])
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def block_size(window: int) -> int:
    """Queries per block, C."""
    return max(16, min(_MAX_BLOCK, window))


def _sliding_dense(
    query: Tensor,
    states: SlidingStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float,
) -> Tensor:
    """Few queries (decode, short chunks), or keys of a fixed size: all under one mask."""
    fixed = span.start is not None or states.slots is not None
    key, value, slots = states.with_slots(span)
    if span.is_plain and not fixed and span.q_length == 1:
        return masked_attention(query, key, value, scores, dropout)

    def make() -> Tensor:
        queries = span.query_slots(query.device)
        return span.visible(queries, slots, layout.window_size, layout.sinks)[:, None]

    name = ("dense", layout.window_size, layout.sinks, key.shape[2])
    return masked_attention(query, key, value, scores, dropout, span.memo(name, make))


def _banded_prefill(
    query: Tensor,
    states: SlidingStates,
    span: Span,
    window: int,
    block: int,
    scores: Scores,
    dropout: float,
) -> Tensor:
    """A whole plain sequence without sinks: no padding, no copies of keys or queries.

    The first W queries are plainly causal, whole blocks follow, the rest is one short block.
    """
    key, value = states.key, states.value
    batch, heads, length, dim = query.shape
    head = masked_attention(
        query[:, :, :window], key[:, :, :window], value[:, :, :window], scores, dropout,
        is_causal=True,
    )  # fmt: skip
    outputs = [head]
    count = (length - window) // block
    middle = window + count * block
    if count:
        blocks = _blocks(query[:, :, window:middle].flatten(0, 1), count, block)
        out = masked_attention(
            blocks,
            bands(key[:, :, :middle].flatten(0, 1), block, window),
            bands(value[:, :, :middle].flatten(0, 1), block, window),
            scores,
            dropout,
            _band_mask(span, block, window, query.device),
        )  # [n, B * HQ, C, D]
        outputs.append(out.transpose(0, 1).reshape(batch, heads, count * block, dim))
    if middle < length:
        rest, start = length - middle, middle - window
        mask = _band_mask(span, rest, window, query.device)
        tail = query[:, :, middle:], key[:, :, start:], value[:, :, start:]
        outputs.append(masked_attention(*tail, scores, dropout, mask))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else head


def _blocks(states: Tensor, count: int, block: int) -> Tensor:
    """[H, n * C, D] as [n, H, C, D]."""
    heads, _, dim = states.shape
    return states.reshape(heads, count, block, dim).transpose(0, 1)


def _band_mask(span: Span, queries: int, window: int, device: torch.device) -> Tensor:
    """Causal band for `queries` that end where their W + queries keys end: bool [queries, keys]."""

    def make() -> Tensor:
        q = torch.arange(window, window + queries, device=device)[:, None]
        k = torch.arange(window + queries, device=device)[None]
        return (k <= q) & (q - k < window)

    mask: Tensor = span.memo(("plain band", queries, window), make)
    return mask


def _row(states: SlidingStates, row: int) -> SlidingStates:
    fields = (states.key, states.value, states.sink_key, states.sink_value)
    key, value, sink_key, sink_value = (None if x is None else x[row : row + 1] for x in fields)
    assert key is not None and value is not None
    return SlidingStates(key, value, sink_key, sink_value)


def _banded_row(
    query: Tensor,
    states: SlidingStates,
    layout: HeadLayout,
    span: Span,
    row: int,
    block: int,
    scores: Scores,
    dropout: float,
) -> Tensor:
    """One row of the batch with padding, documents, sinks or a past: [1, HQ_sliding, T, D]."""
    window, sinks, length = layout.window_size, layout.sinks, query.shape[2]
    count = -(-length // block)
    first = span.kv_length - states.key.shape[2]
    left, right = window - (span.q_offset - first), count * block - length
    query_blocks = _blocks(F.pad(query[0], (0, 0, 0, right)), count, block)
    keys, values = (
        bands(F.pad(x[0], (0, 0, left, right)), block, window) for x in (states.key, states.value)
    )

    def make() -> tuple[Tensor, Tensor | None]:
        return _row_mask(layout, span, row, block, first, query.device)

    shared = 0 if span.valid is None and span.document is None else row
    name = ("band", window, sinks, block, first, shared)
    mask, sink_slots = span.memo(name, make)
    if sink_slots is not None:
        if states.sink_key is not None and states.sink_value is not None:
            narrow = span.row(row)  # some sinks may have come with this pass
            extra_key = gather_sinks(states.key, states.sink_key, narrow, sinks)
            extra_value = gather_sinks(states.value, states.sink_value, narrow, sinks)
            extra = extra_key.expand(count, -1, -1, -1), extra_value.expand(count, -1, -1, -1)
        else:
            index = sink_slots.clamp(0, states.key.shape[2] - 1).reshape(-1)
            extra_key, extra_value = (
                _blocks(x[0].index_select(1, index), count, sinks)
                for x in (states.key, states.value)
            )
            extra = extra_key, extra_value
        keys, values = torch.cat([extra[0], keys], dim=2), torch.cat([extra[1], values], dim=2)
    out = masked_attention(query_blocks, keys, values, scores, dropout, mask[:, None])
    return out.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _row_mask(
    layout: HeadLayout, span: Span, row: int, block: int, first: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Masks [n, C, S + C + W] of a row's blocks; slots [n, S] of the sinks before each band.

    At most one document reaches into a band from before it: its sinks are the extra keys. Sinks
    inside the band are keys of the band.
    """
    window, sinks = layout.window_size, layout.sinks
    count = -(-span.q_length // block)
    starts = span.q_offset + block * torch.arange(count, device=device)[:, None]
    queries = starts + torch.arange(block, device=device)
    keys = starts + torch.arange(-window, block, device=device)
    keys = torch.where(keys < first, -1, keys)
    queries = queries.clamp(max=span.kv_length - 1)
    sink_slots = None
    if sinks:
        offsets = torch.arange(sinks, device=device)
        if span.document is not None:
            begin = (starts - window).clamp(min=0, max=span.kv_length - 1)
            sink_slots = span.document_starts()[row][begin] + offsets
        else:
            slots = span.sink_slots(sinks, device)
            sink_slots = slots[min(row, slots.shape[0] - 1)].expand(count, -1)
        before = (sink_slots < starts - window) | (sink_slots < first)
        keys = torch.cat([torch.where(before, sink_slots, -1), keys], dim=1)
    narrow = span.row(row)
    return narrow.visible(queries[None], keys[None], window, sinks)[0], sink_slots
