"""Attention of both kinds of heads in one kernel of torch's flex_attention, on a GPU.

Shapes: B batch, T queries, HQ query heads, D head dimension, W window; blocks of tokens, nq of
queries and nk of keys. Which heads slide is data of the kernel, so a new head mask compiles nothing
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from bosch.attention.layout import CachedStates, HeadLayout
from bosch.attention.scores import Scores
from bosch.attention.sdpa import sdpa_attention
from bosch.attention.span import Span

_FLEX_BLOCK = 128


def flex_kernel_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of both kinds of heads: [B, T, HQ, D].

    Passes with a cache of hybrid or fixed size, whose heads hold different tokens, and passes of
    less than a block go the way of the sdpa backend. Raises ValueError for attention dropout.
    """
    if isinstance(key, CachedStates) or isinstance(value, CachedStates):
        return sdpa_attention(query, key, value, layout, span, scores, dropout)
    if span.q_length < _FLEX_BLOCK or span.start is not None:
        return sdpa_attention(query, key, value, layout, span, scores, dropout)
    if dropout:
        raise ValueError("the flex backend has no attention dropout: set it to 0 or use sdpa")
    name = ("flex", layout.full, layout.sliding, layout.window_size, layout.sinks)
    heads = query.shape[1]
    mask = span.memo((*name, heads), lambda: flex_block_mask(layout, span, heads, query.device))
    out = _kernel(query.device.type)(
        query, key, value, block_mask=mask, scale=scores.scaling, enable_gqa=heads != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """flex_attention, compiled except on the CPU, where it serves as its own reference."""
    if device == "cpu":
        return torch_flex.flex_attention
    return torch.compile(torch_flex.flex_attention)


def flex_block_mask(layout: HeadLayout, span: Span, heads: int, device: torch.device) -> Any:
    """What each of `heads` query heads sees, with the blocks of it built from the bands.

    A block that is listed may still be invisible in part, or wholly; one that is not listed is
    wholly invisible.
    """
    kinds = torch.ones(layout.num_key_value_heads, dtype=torch.long, device=device)
    kinds[list(layout.full)] = 0
    kinds = kinds.repeat_interleave(heads // len(kinds))  # [HQ]: 0 full, 1 sliding
    some, whole = _blocks_seen(layout, span, device)
    some, whole = (x.index_select(1, kinds) for x in (some & ~whole, whole))
    return torch_flex.BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(whole),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=_rule(layout, span, kinds, device),
        seq_lengths=(span.q_length, span.kv_length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of the marked blocks [..., nq, nk] of each row, int32."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _blocks_seen(layout: HeadLayout, span: Span, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks of which a full or sliding head may see some, and sees all: [B or 1, 2, nq, nk]."""
    size, window = _FLEX_BLOCK, layout.window_size
    count_q, count_k = -(-span.q_length // size), -(-span.kv_length // size)
    first_q = (span.q_offset + size * torch.arange(count_q, device=device))[:, None]
    first_k = (size * torch.arange(count_k, device=device))[None]
    last_q = (first_q + size - 1).clamp(max=span.kv_length - 1)
    last_k = first_k + size - 1
    some = torch.stack([first_k <= last_q, (first_k <= last_q) & (first_q - last_k < window)])
    whole = torch.stack([last_k <= first_q, (last_k <= first_q) & (last_q - first_k < window)])
    whole = whole[None] & span.is_plain
    some = some[None]
    if layout.sinks:
        slots = _sinks_seen(layout.sinks, span, first_q[:, 0], device)
        rows = slots.shape[0]
        marked = torch.zeros(rows, count_q, count_k, dtype=torch.bool, device=device)
        index = (slots.clamp(max=span.kv_length - 1) // size).expand(rows, count_q, -1)
        marked.scatter_(2, index, True)
        some = some.expand(rows, -1, -1, -1).clone()
        some[:, 1] |= marked
        whole = whole.expand(rows, -1, -1, -1)
    return some, whole


def _sinks_seen(sinks: int, span: Span, first_q: Tensor, device: torch.device) -> Tensor:
    """Slots of the sinks that may lie before a block's band: [B or 1, nq or 1, S]."""
    if span.document is not None:
        offsets = torch.arange(sinks, device=device)
        return span.document_starts()[:, first_q, None] + offsets
    if span.is_plain:
        return torch.arange(sinks, device=device)[None, None]
    return span.sink_slots(sinks, device)[:, None]


def _rule(
    layout: HeadLayout, span: Span, kinds: Tensor, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`span.visible` for one query and key of a head, as flex_attention asks for it."""
    offset, window, sinks = span.q_offset, layout.window_size, layout.sinks
    document = None if span.is_plain else span.document
    valid = None if span.is_plain else span.valid
    rank = span.rank(device) if sinks else None
    many = rank is not None and rank.shape[0] > 1

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        near = (kinds[head] == 0) | (distance < window)
        if rank is not None:
            near = near | (rank[row if many else row * 0, key] < sinks)
        seen = (distance >= 0) & near
        if document is not None:
            seen = seen & (document[row, query + offset] == document[row, key])
        if valid is not None:
            seen = (seen & valid[row, key]) | (distance == 0)
        return seen

    return sees
