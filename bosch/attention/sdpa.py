"""Attention of all groups of heads by torch's scaled_dot_product_attention: CPU and fallback.

Shapes: B batch, T queries, HQ query heads, D head dimension, W window. Full heads take one
causal call. Sliding heads are cut into blocks of C queries that see a band of C + W keys, so that
their cost grows linearly in T. Bands overlap: block i reads keys i*C .. i*C + C + W - 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.attention.causal import causal_attention, masked_attention
from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedStates, GroupStates, HeadLayout, gather_sinks, split_states
from bosch.attention.logit_transform import LogitTransform
from bosch.window import Window, block_size


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


def sdpa_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    context: AttentionContext,
    transform: LogitTransform,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of all groups of heads: [B, T, HQ, D]."""
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    # No query is W or more slots after a key, so that all groups of heads see the same.
    no_difference = all(context.kv_length <= window.size for window in layout.windows)
    no_difference = no_difference and not transform.sliding_only
    if no_difference and isinstance(key, Tensor) and isinstance(value, Tensor):
        out = causal_attention(query, key, value, context, transform, dropout)
        return out.transpose(1, 2).contiguous()
    outputs = []
    for group, states in zip(layout.groups, split_states(key, value, layout), strict=True):
        heads = layout.heads_of(query, group, q_per_kv)
        own_transform = transform.of(layout, group, q_per_kv)
        if group.window is None:
            pair = states.key, states.value
            outputs.append(causal_attention(heads, *pair, context, own_transform, dropout))
        else:
            outputs.append(_sliding(heads, states, group.window, context, own_transform, dropout))
    return layout.merge(outputs, q_per_kv)


def _trim(states: GroupStates, context: AttentionContext, window: Window) -> GroupStates:
    """Drop keys that no query of this pass sees; sinks among them are kept aside."""
    needed = window.past + context.q_length
    key, value = states.key, states.value
    # Documents have sinks of their own, of which some may be among the first keys.
    if key.shape[2] <= needed or context.document is not None:
        return states
    recent = GroupStates(key[:, :, -needed:], value[:, :, -needed:])
    if window.sinks:
        recent.sink_key = gather_sinks(key, states.sink_key, context, window.sinks)
        recent.sink_value = gather_sinks(value, states.sink_value, context, window.sinks)
    return recent


def _sliding(
    query: Tensor,
    states: GroupStates,
    window: Window,
    context: AttentionContext,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """Sliding-window attention of a group, [B, HQ_group, T, D]."""
    # A cache of fixed size: only the device knows which slots the ring holds, a mask must say it.
    if context.start is not None or states.slots is not None:
        return _sliding_dense(query, states, window, context, transform, dropout)
    states = _trim(states, context, window)
    first = context.kv_length - states.key.shape[2]
    # Everything so far lies in the window.
    if first == 0 and context.kv_length <= window.size:
        return causal_attention(query, states.key, states.value, context, transform, dropout)
    block = block_size(window.size)
    # Fewer queries than a block: filling one up would compute more than the mask does.
    if context.q_length < block:
        return _sliding_dense(query, states, window, context, transform, dropout)
    # A whole sequence in which every row sees the same slots: all rows at once.
    if context.is_plain and context.q_offset == 0 and states.sink_key is None:
        return _banded_prefill(query, states, context, window, block, transform, dropout)
    # Padding, documents or a past: each row has its own mask and its own sinks.
    rows = [
        _banded_row(
            query[row : row + 1], _row(states, row), window, context, row, block, transform, dropout
        )
        for row in range(query.shape[0])
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _sliding_dense(
    query: Tensor,
    states: GroupStates,
    window: Window,
    context: AttentionContext,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """Few queries (decode, short chunks), or keys of a fixed size: all under one mask."""
    fixed = context.start is not None or states.slots is not None
    key, value, slots = states.with_slots(context)
    if context.is_plain and not fixed and context.q_length == 1:
        return masked_attention(query, key, value, transform, dropout)

    def make() -> Tensor:
        queries = context.query_slots(query.device)
        return context.visible(queries, slots, window)[:, None]

    name = ("dense", window, key.shape[2])
    return masked_attention(query, key, value, transform, dropout, context.memo(name, make))


def _banded_prefill(
    query: Tensor,
    states: GroupStates,
    context: AttentionContext,
    window: Window,
    block: int,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """A whole plain sequence: no padding, and without sinks no copies of keys or queries.

    The first W + S queries are plainly causal, whole blocks follow, the rest is one short block.
    """
    key, value, sinks = states.key, states.value, window.sinks
    batch, heads, length, dim = query.shape
    first = min(window.most_keys, length)
    head = masked_attention(
        query[:, :, :first], key[:, :, :first], value[:, :, :first], transform, dropout,
        is_causal=True,
    )  # fmt: skip
    outputs = [head]
    count = (length - first) // block
    middle = first + count * block
    # What a band begins with: the W slots before its first query.
    start, shown = first - window.size, (key[:, :, :sinks], value[:, :, :sinks])
    if count:
        out = _attend_bands(
            _blocks(query[:, :, first:middle].flatten(0, 1), count, block),
            bands(key[:, :, start:middle].flatten(0, 1), block, window.size),
            bands(value[:, :, start:middle].flatten(0, 1), block, window.size),
            tuple(x.flatten(0, 1)[None].expand(count, -1, -1, -1) for x in shown),
            _band_mask(context, block, window, query.device)[None],
            transform,
            dropout,
        )  # [n, B * HQ, C, D]
        outputs.append(out.transpose(0, 1).reshape(batch, heads, count * block, dim))
        del out  # a copy was made of it
    if middle < length:
        rest, start = length - middle, middle - window.size
        mask = _band_mask(context, rest, window, query.device)
        last_key, last_value = key[:, :, start:], value[:, :, start:]
        if sinks:
            last_key = torch.cat([shown[0], last_key], dim=2)
            last_value = torch.cat([shown[1], last_value], dim=2)
        tail = query[:, :, middle:], last_key, last_value
        outputs.append(masked_attention(*tail, transform, dropout, mask))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else head


def _attend_bands(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: tuple[Tensor, ...],
    mask: Tensor,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """Attention of blocks [n, H, C, D] to the sinks [n, H, S, D] and the band of each, views.

    `mask` is [n or 1, C, S + C + W]. Sinks and band must be copied into one tensor: of so few
    blocks at a time that the copies of a pass without gradients never outgrow the keys.
    """
    if not sinks[0].shape[2]:
        return masked_attention(queries, keys, values, transform, dropout, mask[:, None])
    count = step = keys.shape[0]
    # In a backward pass each slice of the bands would come back as large as all of them.
    if not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)):
        step = max(1, count * queries.shape[2] // (4 * keys.shape[2]))
    outputs = []
    for start in range(0, count, step):
        blocks = slice(start, start + step)
        outputs.append(
            masked_attention(
                queries[blocks],
                torch.cat([sinks[0][blocks], keys[blocks]], dim=2),
                torch.cat([sinks[1][blocks], values[blocks]], dim=2),
                transform,
                dropout,
                (mask if mask.shape[0] == 1 else mask[blocks])[:, None],
            )
        )
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _blocks(states: Tensor, count: int, block: int) -> Tensor:
    """[H, n * C, D] as [n, H, C, D]."""
    heads, _, dim = states.shape
    return states.reshape(heads, count, block, dim).transpose(0, 1)


def _band_mask(
    context: AttentionContext, queries: int, window: Window, device: torch.device
) -> Tensor:
    """Causal band for `queries` whose band, and all sinks before it, end where they end.

    Bool [queries, S + W + queries].
    """

    def make() -> Tensor:
        q = torch.arange(window.size, window.size + queries, device=device)[:, None]
        k = torch.arange(window.size + queries, device=device)[None]
        band = (k <= q) & (q - k < window.size)
        return torch.cat([band.new_ones(queries, window.sinks), band], dim=1)

    mask: Tensor = context.memo(("plain band", queries, window), make)
    return mask


def _row(states: GroupStates, row: int) -> GroupStates:
    fields = (states.key, states.value, states.sink_key, states.sink_value)
    key, value, sink_key, sink_value = (None if x is None else x[row : row + 1] for x in fields)
    assert key is not None and value is not None
    return GroupStates(key, value, sink_key, sink_value)


def _banded_row(
    query: Tensor,
    states: GroupStates,
    window: Window,
    context: AttentionContext,
    row: int,
    block: int,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """One row of the batch with padding, documents, sinks or a past: [1, HQ_group, T, D]."""
    size, sinks, length = window.size, window.sinks, query.shape[2]
    count = -(-length // block)
    first = context.kv_length - states.key.shape[2]
    # Pad the keys so that block 0's band begins W slots before its first query, and the last block
    # is whole; what is padded has slots below `first` or beyond the end, which no mask shows.
    left, right = size - (context.q_offset - first), count * block - length
    query_blocks = _blocks(F.pad(query[0], (0, 0, 0, right)), count, block)
    keys, values = (
        bands(F.pad(x[0], (0, 0, left, right)), block, size) for x in (states.key, states.value)
    )

    def make() -> tuple[Tensor, Tensor | None]:
        return _row_mask(window, context, row, block, first, query.device)

    shared = 0 if context.valid is None and context.document is None else row
    name = ("band", window, block, first, shared)
    mask, sink_slots = context.memo(name, make)
    if sink_slots is None:
        shown = keys[:, :, :0], values[:, :, :0]
    elif states.sink_key is not None and states.sink_value is not None:
        # A cache keeps the sinks apart; some may have come with this pass only.
        narrow = context.row(row)
        extra_key = gather_sinks(states.key, states.sink_key, narrow, sinks)
        extra_value = gather_sinks(states.value, states.sink_value, narrow, sinks)
        shown = extra_key.expand(count, -1, -1, -1), extra_value.expand(count, -1, -1, -1)
    else:
        # All keys are here: each block takes the sinks of the document its band begins in.
        index = sink_slots.clamp(0, states.key.shape[2] - 1).reshape(-1)
        extra_key, extra_value = (
            _blocks(x[0].index_select(1, index), count, sinks) for x in (states.key, states.value)
        )
        shown = extra_key, extra_value
    out = _attend_bands(query_blocks, keys, values, shown, mask, transform, dropout)
    return out.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _row_mask(
    window: Window,
    context: AttentionContext,
    row: int,
    block: int,
    first: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Masks [n, C, S + C + W] of a row's blocks; slots [n, S] of the sinks before each band.

    At most one document reaches into a band from before it: its sinks are the extra keys. Sinks
    inside the band are keys of the band.
    """
    size, sinks = window.size, window.sinks
    count = -(-context.q_length // block)
    starts = context.q_offset + block * torch.arange(count, device=device)[:, None]
    queries = starts + torch.arange(block, device=device)
    keys = starts + torch.arange(-size, block, device=device)
    keys = torch.where(keys < first, -1, keys)
    queries = queries.clamp(max=context.kv_length - 1)
    sink_slots = None
    if sinks:
        offsets = torch.arange(sinks, device=device)
        if context.document is not None:
            begin = (starts - size).clamp(min=0, max=context.kv_length - 1)
            sink_slots = context.document_starts()[row][begin] + offsets
        else:
            slots = context.sink_slots(sinks, device)
            sink_slots = slots[min(row, slots.shape[0] - 1)].expand(count, -1)
        before = (sink_slots < starts - size) | (sink_slots < first)
        keys = torch.cat([torch.where(before, sink_slots, -1), keys], dim=1)
    narrow = context.row(row)
    return narrow.visible(queries[None], keys[None], window)[0], sink_slots
