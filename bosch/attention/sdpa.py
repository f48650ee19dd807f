"""Attention with torch's scaled_dot_product_attention, on every device.

Shapes: B batch, T queries, HQ query heads, D head dimension, W window. Full heads take one
causal call. Sliding heads are cut into blocks of C queries that see a band of C + W keys, so that
their cost grows linearly in T. Bands overlap: block i reads keys i*C .. i*C + C + W - 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.attention.call import AttentionCall, GroupCall
from bosch.attention.causal import causal_attention, masked_attention
from bosch.attention.context import AttentionContext
from bosch.attention.layout import gather_sinks
from bosch.attention.logit_transform import LogitTransform
from bosch.window import Window, block_size


class _Bands(torch.autograd.Function):
    """Overlapping views without copies; backward adds the overlapping pieces slice by slice.

    Autograd's own backward adds single elements, which costs more than the attention itself.
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
        # The last piece has whole blocks, too, since torch.compile mishandles views with gaps.
        starts = range(0, width, block)
        total = grad.new_zeros(heads, starts[-1] + n * block, dim)
        for start in starts:
            piece = grad[:, :, start : start + block].transpose(0, 1)  # [H, n, <= C, D]
            target = total[:, start : start + n * block].view(heads, n, block, dim)
            target[:, :, : piece.shape[2]].add_(piece)
        return total[:, : ctx.length], None, None


def _view(keys: Tensor, block: int, width: int) -> Tensor:
    return keys.unfold(1, width, block).permute(1, 0, 3, 2)


def bands(keys: Tensor, block: int, window: int) -> Tensor:
    """Keys [H, n*C + W, D] as bands [n, H, C + W, D]; a view, differentiable."""
    width = block + window
    if keys.requires_grad and torch.is_grad_enabled():
        return _Bands.apply(keys, block, width)  # type: ignore[no-untyped-call]
    return _view(keys, block, width)


def sdpa_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups of heads: [B, T, HQ, D]."""
    key, value, length = call.key, call.value, call.context.kv_length
    # No query is W or more slots after a key, so all groups of heads see the same keys.
    fits = all(length <= window.size for window in call.layout.windows)
    if fits and isinstance(key, Tensor) and isinstance(value, Tensor):
        options = call.context, call.transform, call.dropout
        out = causal_attention(GroupCall(call.query, key, value, None, *options))
        return out.transpose(1, 2).contiguous()

    def attend(group: GroupCall) -> Tensor:
        return causal_attention(group) if group.window is None else _sliding(group, group.window)

    return call.by_group(attend)


def _trim(call: GroupCall, window: Window) -> GroupCall:
    """Drop keys that no query of this pass sees, except sinks, which are stored apart."""
    key, value, context = call.key, call.value, call.context
    needed = window.past + context.q_length
    # Each document has its own sinks, some of which may be among the first keys.
    if key.shape[2] <= needed or context.document is not None:
        return call
    sink_key = sink_value = None
    if window.sinks:
        sink_key = gather_sinks(key, call.sink_key, context, window.sinks)
        sink_value = gather_sinks(value, call.sink_value, context, window.sinks)
    return call._replace(
        key=key[:, :, -needed:], value=value[:, :, -needed:],
        sink_key=sink_key, sink_value=sink_value,
    )  # fmt: skip


def _sliding(call: GroupCall, window: Window) -> Tensor:
    """Sliding-window attention of a group, [B, HQ_group, T, D]."""
    context = call.context
    # A cache of fixed size: only the device knows the slots of the ring, so it needs a mask.
    if context.start is not None:
        return _sliding_dense(call, window)
    call = _trim(call, window)
    first = context.kv_length - call.key.shape[2]
    # All keys are within the window.
    if first == 0 and context.kv_length <= window.size:
        return causal_attention(call)
    block = block_size(window.size)
    # Fewer queries than a block: a mask costs less than padding them to a block.
    if context.q_length < block:
        return _sliding_dense(call, window)
    # A whole sequence in which every row sees the same slots: all rows at once.
    if context.is_plain and context.q_offset == 0 and call.sink_key is None:
        return _banded_prefill(call, window, block)
    # Padding, documents or a past: each row has its own mask and its own sinks.
    rows = [_banded_row(call, window, row, block) for row in range(call.query.shape[0])]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _sliding_dense(call: GroupCall, window: Window) -> Tensor:
    """Attention with one mask: few queries (decoding, short chunks), or a cache of fixed size."""
    query, context = call.query, call.context
    key, value, slots = call.with_slots()
    mask = None
    if context.start is not None or not context.is_plain or context.q_length > 1:
        queries = context.query_slots(query.device)
        mask = context.memo(
            ("dense", window, key.shape[2]),
            lambda: context.visible(queries, slots, window)[:, None],
        )
    return masked_attention(query, key, value, call.transform, call.dropout, mask)


def _banded_prefill(call: GroupCall, window: Window, block: int) -> Tensor:
    """A whole sequence without padding: W + S causal queries, whole blocks, and a short rest."""
    query, key, value, sinks = call.query, call.key, call.value, window.sinks
    options, context = (call.transform, call.dropout), call.context
    batch, heads, length, dim = query.shape
    first = min(window.max_keys, length)
    beginning = query[:, :, :first], key[:, :, :first], value[:, :, :first]
    first_out = masked_attention(*beginning, *options, is_causal=True)
    outputs = [first_out]
    count = (length - first) // block
    middle = first + count * block
    # A band begins with the W slots before its first query.
    start, sink_states = first - window.size, (key[:, :, :sinks], value[:, :, :sinks])
    if count:
        out = _attend_bands(
            _blocks(query[:, :, first:middle].flatten(0, 1), count, block),
            bands(key[:, :, start:middle].flatten(0, 1), block, window.size),
            bands(value[:, :, start:middle].flatten(0, 1), block, window.size),
            tuple(x.flatten(0, 1)[None].expand(count, -1, -1, -1) for x in sink_states),
            _band_mask(context, block, window, query.device)[None],
            *options,
        )  # [n, B * HQ, C, D]
        outputs.append(out.transpose(0, 1).reshape(batch, heads, count * block, dim))
        del out  # it was copied
    if middle < length:
        rest, start = length - middle, middle - window.size
        mask = _band_mask(context, rest, window, query.device)
        last_key, last_value = key[:, :, start:], value[:, :, start:]
        if sinks:
            last_key = torch.cat([sink_states[0], last_key], dim=2)
            last_value = torch.cat([sink_states[1], last_value], dim=2)
        tail = query[:, :, middle:], last_key, last_value
        outputs.append(masked_attention(*tail, *options, mask))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else first_out


def _attend_bands(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: tuple[Tensor, ...],
    mask: Tensor,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """Attention of blocks [n, H, C, D] to their sinks [n, H, S, D] and bands, which are views.

    `mask` is [n or 1, C, S + C + W]. Sinks and bands are copied into one tensor, for few blocks at
    a time: without gradients the copies never take more memory than the keys.
    """
    if not sinks[0].shape[2]:
        return masked_attention(queries, keys, values, transform, dropout, mask[:, None])
    count = step = keys.shape[0]
    # In a backward pass each slice's gradient would be as large as all bands.
    if not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)):
        step = max(1, count * queries.shape[2] // (4 * keys.shape[2]))
    outputs = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        seen_keys = torch.cat([sinks[0][part], keys[part]], dim=2)
        states = queries[part], seen_keys, torch.cat([sinks[1][part], values[part]], dim=2)
        visible = (mask if mask.shape[0] == 1 else mask[part])[:, None]
        outputs.append(masked_attention(*states, transform, dropout, visible))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _blocks(states: Tensor, count: int, block: int) -> Tensor:
    """[H, n * C, D] as [n, H, C, D]."""
    heads, _, dim = states.shape
    return states.reshape(heads, count, block, dim).transpose(0, 1)


def _band_mask(
    context: AttentionContext, queries: int, window: Window, device: torch.device
) -> Tensor:
    """Mask of `queries` queries over the sinks and their band: bool [queries, S + W + queries].

    The last keys of the band are the queries' own.
    """

    def make() -> Tensor:
        q = torch.arange(window.size, window.size + queries, device=device)[:, None]
        k = torch.arange(window.size + queries, device=device)[None]
        band = (k <= q) & (q - k < window.size)
        return torch.cat([band.new_ones(queries, window.sinks), band], dim=1)

    return context.memo(("plain band", queries, window), make)


def _banded_row(call: GroupCall, window: Window, row: int, block: int) -> Tensor:
    """One row of the batch with padding, documents, sinks or a past: [1, HQ_group, T, D]."""
    this_row, context = slice(row, row + 1), call.context
    query, key, value = (x[this_row] for x in (call.query, call.key, call.value))
    size, sinks, length = window.size, window.sinks, query.shape[2]
    count = -(-length // block)
    first = context.kv_length - key.shape[2]
    # Pad the keys so that block 0's band begins W slots before its first query, and the last block
    # is whole; padded keys have slots below `first` or beyond the end, which every mask hides.
    left, right = size - (context.q_offset - first), count * block - length
    query_blocks = _blocks(F.pad(query[0], (0, 0, 0, right)), count, block)
    keys, values = (bands(F.pad(x[0], (0, 0, left, right)), block, size) for x in (key, value))

    # Without padding and documents all rows share the mask of row 0.
    mask_row = 0 if context.valid is None and context.document is None else row
    memo_key = ("band", window, block, first, mask_row)
    mask, sink_slots = context.memo(memo_key, lambda: _row_mask(call, window, row, block))
    if sink_slots is None:
        sink_states = keys[:, :, :0], values[:, :, :0]
    elif call.sink_key is not None and call.sink_value is not None:
        # A cache stores sinks apart; some may be new in this pass.
        row_context = context.row(row)
        sink_key = gather_sinks(key, call.sink_key[this_row], row_context, sinks)
        sink_value = gather_sinks(value, call.sink_value[this_row], row_context, sinks)
        sink_states = sink_key.expand(count, -1, -1, -1), sink_value.expand(count, -1, -1, -1)
    else:
        # All keys are present: each block takes the sinks of the document in which its band begins.
        index = sink_slots.clamp(0, key.shape[2] - 1).reshape(-1)
        sink_key, sink_value = (x[0].index_select(1, index) for x in (key, value))
        sink_states = _blocks(sink_key, count, sinks), _blocks(sink_value, count, sinks)
    states = query_blocks, keys, values, sink_states
    out = _attend_bands(*states, mask, call.transform, call.dropout)
    return out.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _row_mask(
    call: GroupCall, window: Window, row: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """Masks [n, C, S + C + W] of a row's blocks; slots [n, S] of the sinks before each band.

    At most one document begins before a band and reaches into it; its sinks are the extra keys.
    Sinks inside the band are keys of the band.
    """
    context, size, sinks, device = call.context, window.size, window.sinks, call.key.device
    first = context.kv_length - call.key.shape[2]
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
            begin = (starts - size).clamp(min=0)
            sink_slots = context.document_starts()[row][begin] + offsets
        else:
            slots = context.sink_slots(sinks, device)
            sink_slots = slots[min(row, slots.shape[0] - 1)].expand(count, -1)
        before = (sink_slots < starts - size) | (sink_slots < first)
        keys = torch.cat([torch.where(before, sink_slots, -1), keys], dim=1)
    return context.row(row).visible(queries[None], keys[None], window)[0], sink_slots
