"""Attention with the flash-attn package: one call for each group of heads.

Shapes: B batch, T queries, Tk keys, HQ query heads, D head dimension. A segment is a document, or a
row's tokens without padding; tokens see only their segment, and the segments are concatenated.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bosch.attention.call import AttentionCall, GroupCall
from bosch.attention.context import AttentionContext
from bosch.attention.sdpa import sdpa_attention
from bosch.errors import UserError

_NO_WINDOW = (-1, -1)


def flash_kernel_attention(call: AttentionCall) -> Tensor:
    """Attention [B, T, HQ, D]; by sdpa for fixed caches.

    Raises UserError for padding between a row's tokens.
    """
    if call.context.start is not None:
        return sdpa_attention(call)
    return call.by_group(_flash)


def _flash(group: GroupCall) -> Tensor:
    """Causal attention, [B, HQ, T, D]; flash-attn too aligns the last query with the last key."""
    options: dict[str, Any] = {
        "dropout_p": group.dropout, "softmax_scale": group.transform.scaling, "causal": True,
        "window_size": _NO_WINDOW if group.window is None else group.window.flash,
    }  # fmt: skip
    query, key, value = (x.transpose(1, 2) for x in (group.query, group.key, group.value))
    context, shape, function = group.context, query.shape, "flash_attn_func"
    borders: tuple[Any, ...] = ()
    if not context.is_plain:
        function = "flash_attn_varlen_func"
        count = key.shape[1]
        segments = context.memo(
            ("flash", count), lambda: _flash_segments(context, count, query.device)
        )
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        if segments.keys is not None:
            key, value = (x.index_select(0, segments.keys) for x in (key, value))
        borders = segments[:4]
    # Imported by name, since transformers would require any package that the code file imports.
    package = importlib.import_module("flash_attn")
    out = getattr(package, function)(query, key, value, *borders, **options)
    return out.view(shape).transpose(1, 2)


class Segments(NamedTuple):
    """The concatenated segments of all rows, as arguments of flash-attn.

    `cu_seqlens_q`, `cu_seqlens_k` int32 [segments + 1]: where each begins and the last ends;
    `max_seqlen_q`, `max_seqlen_k`: the longest; `keys`: those of B * Tk in a segment, None for all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: Tensor | None


def _flash_segments(context: AttentionContext, count: int, device: torch.device) -> Segments:
    """Segments over the last `count` key slots; a padded query is its own segment.

    Raises UserError for padding between tokens, which a window counts and flash-attn would not.
    """
    marks = context.document if context.valid is None else context.valid
    assert marks is not None
    rows, first = marks.shape[0], context.kv_length - count
    begins = torch.zeros(rows, count, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if context.valid is not None:
        runs = (context.valid[:, 1:] & ~context.valid[:, :-1]).sum(1) + context.valid[:, 0]
        if bool((runs > 1).any()):
            raise UserError(
                "the flash backend takes padding at the ends of a row only, not between its "
                "tokens: choose sdpa"
            )
        padded = ~context.valid[:, first:]
        begins |= padded
        begins[:, 1:] |= padded[:, :-1]
    if context.document is not None:
        begins[:, 1:] |= context.document[:, first + 1 :] != context.document[:, first:-1]
    segment_ids = begins.flatten().long().cumsum(0) - 1  # segment of each key
    total = int(segment_ids[-1]) + 1
    is_query = torch.arange(first, context.kv_length, device=device) >= context.q_offset
    keys = torch.bincount(segment_ids, minlength=total)
    queries = torch.bincount(segment_ids, weights=is_query.repeat(rows), minlength=total).long()
    selected = None
    if bool((queries == 0).any()):
        selected = (queries > 0)[segment_ids].nonzero()[:, 0]
        keys, queries = keys[queries > 0], queries[queries > 0]
    cu_q, cu_k = (nn.functional.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (queries, keys))
    return Segments(cu_q, cu_k, int(queries.max()), int(keys.max()), selected)
