"""Attention of all groups of heads in one kernel of torch's flex_attention, on a GPU.

Shapes: B batch, T queries, HQ query heads, D head dimension, W window; nq blocks of queries, nk of
keys. The reach of a head is an input of the kernel, so a new mask compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from bosch.hybrid import AttentionCall, AttentionContext, HeadLayout, sdpa_attention

FLEX_BLOCK = 128


def flex_kernel_attention(call: AttentionCall) -> Tensor:
    """Attention [B, T, HQ, D]; by sdpa under FLEX_BLOCK queries or over a cache of fixed size."""
    query, key, value, context = call.query, call.key, call.value, call.context
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    if context.q_length < FLEX_BLOCK or context.start is not None:
        return sdpa_attention(call)
    layout, transform, heads = call.layout, call.transform, query.shape[1]
    mask = context.memo(
        ("flex", layout, heads), lambda: flex_block_mask(layout, context, heads, query.device)
    )
    options: dict[str, Any] = {
        "block_mask": mask, "scale": transform.scaling, "enable_gqa": heads != key.shape[1],
    }  # fmt: skip
    kernel = kernel_for(query.device.type)
    out: Tensor
    if transform.head_logits is None:
        out = kernel(query, key, value, **options)
    else:
        out, aux = kernel(query, key, value, return_aux=torch_flex.AuxRequest(lse=True), **options)
        logits = transform.head_logits.to(aux.lse.dtype)
        share = torch.sigmoid(aux.lse - logits[:, None])  # [B, HQ, T]
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous()


@functools.cache
def kernel_for(device: str) -> Callable[..., Any]:
    """flex_attention, compiled except on the CPU, where the uncompiled one is the reference."""
    if device == "cpu":
        return torch_flex.flex_attention
    return torch.compile(torch_flex.flex_attention)


def flex_block_mask(
    layout: HeadLayout, context: AttentionContext, heads: int, device: torch.device
) -> Any:
    """Block mask of `heads` query heads from the bands; unlisted blocks have no visible key."""
    groups = torch.empty(layout.num_key_value_heads, dtype=torch.long, device=device)
    for number, group in enumerate(layout.groups):
        groups[list(group.heads)] = number
    groups = groups.repeat_interleave(heads // len(groups))  # [HQ]
    windows = (group.window for group in layout.groups)
    sizes = [context.kv_length if window is None else window.size for window in windows]
    reaches = torch.tensor(sizes, device=device)
    seen, whole = (
        x.index_select(1, groups) for x in _blocks_seen(layout, reaches, context, device)
    )
    return torch_flex.BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=FLEX_BLOCK,
        seq_lengths=(context.q_length, context.kv_length),
        mask_mod=_rule(layout, context, reaches[groups], device),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of the marked blocks in each row of [..., nq, nk], int32."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _blocks_seen(
    layout: HeadLayout, reaches: Tensor, context: AttentionContext, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Blocks with a visible key, and blocks of visible keys only: [B or 1, groups, nq, nk].

    `reaches` [groups] is the number of last keys that each group sees.
    """
    size, reach = FLEX_BLOCK, reaches[:, None, None]
    count_q, count_k = -(-context.q_length // size), -(-context.kv_length // size)
    first_q = (context.q_offset + size * torch.arange(count_q, device=device))[:, None]
    first_k = (size * torch.arange(count_k, device=device))[None]
    last_q = (first_q + size - 1).clamp(max=context.kv_length - 1)
    last_k = first_k + size - 1
    seen = ((first_k <= last_q) & (first_q - last_k < reach))[None]
    whole = ((last_k <= first_q) & (last_q - first_k < reach))[None] & context.is_plain
    if layout.sinks:
        slots = _sinks_seen(layout.sinks, context, first_q[:, 0], device)
        rows = slots.shape[0]
        marked = torch.zeros(rows, count_q, count_k, dtype=torch.bool, device=device)
        index = (slots.clamp(max=context.kv_length - 1) // size).expand(rows, count_q, -1)
        marked.scatter_(2, index, True)
        seen = seen.expand(rows, -1, -1, -1).clone()
        slides = torch.tensor([group.window is not None for group in layout.groups], device=device)
        seen |= marked[:, None] & slides[:, None, None]
        whole = whole.expand(rows, -1, -1, -1)
    return seen, whole


def _sinks_seen(
    sinks: int, context: AttentionContext, first_q: Tensor, device: torch.device
) -> Tensor:
    """Slots of the sinks that may lie before a block's band: [B or 1, nq or 1, S]."""
    if context.document is not None:
        offsets = torch.arange(sinks, device=device)
        return context.document_starts()[:, first_q, None] + offsets
    if context.is_plain:
        return torch.arange(sinks, device=device)[None, None]
    return context.sink_slots(sinks, device)[:, None]


def _rule(
    layout: HeadLayout, context: AttentionContext, reach: Tensor, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`context.visible` as flex_attention's mask_mod: a head sees the last `reach` [HQ] keys."""
    offset, sinks = context.q_offset, layout.sinks
    document = None if context.is_plain else context.document
    valid = None if context.is_plain else context.valid
    rank = context.rank(device) if sinks else None
    has_rows = rank is not None and rank.shape[0] > 1

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        near = distance < reach[head]
        if rank is not None:
            near = near | (rank[row if has_rows else row * 0, key] < sinks)
        visible = (distance >= 0) & near
        if document is not None:
            visible = visible & (document[row, query + offset] == document[row, key])
        if valid is not None:
            visible = (visible & valid[row, key]) | (distance == 0)
        return visible

    return sees
