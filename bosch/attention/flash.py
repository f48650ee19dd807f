"""Attention of both kinds of heads by the flash-attn package: one call for each kind.

Shapes: B batch, T queries, Tk keys, HQ query heads, D head dimension. What may see each other, a
document or a row's tokens without its padding, is a segment; passes of more than one segment per
row put all of them one after another.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bosch.attention.layout import CachedStates, HeadLayout, split_states
from bosch.attention.scores import Scores
from bosch.attention.sdpa import sdpa_attention
from bosch.attention.span import Span
from bosch.errors import UserError
from bosch.windows import flash_window

_NO_WINDOW = (-1, -1)
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def flash_kernel_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of both kinds of heads: [B, T, HQ, D].

    Decoding with a cache of fixed size goes the way of the sdpa backend. Raises UserError for
    a dtype other than float16 and bfloat16, and for padding between a row's tokens.
    """
    if query.dtype not in _FLASH_DTYPES:
        raise UserError(
            f"the flash backend computes in float16 and bfloat16, not in {query.dtype}: load the "
            "model in bfloat16 or choose sdpa"
        )
    ring = isinstance(key, CachedStates) and key.slots is not None
    if span.start is not None or ring:
        return sdpa_attention(query, key, value, layout, span, scores, dropout)
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    full, sliding = split_states(key, value, layout)
    out_full = out_sliding = None
    if full is not None:
        heads = layout.heads_of(query, "full", q_per_kv)
        out_full = _flash(heads, full.key, full.value, span, _NO_WINDOW, scores, dropout)
    if sliding is not None:
        heads, window = (
            layout.heads_of(query, "sliding", q_per_kv),
            flash_window(layout.window_size),
        )
        out_sliding = _flash(heads, sliding.key, sliding.value, span, window, scores, dropout)
    return layout.merge(out_full, out_sliding, q_per_kv)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    window: tuple[int, int],
    scores: Scores,
    dropout: float,
) -> Tensor:
    """Causal attention to the last keys given, [B, HQ, T, D]; flash-attn aligns them likewise."""
    # By name: an import statement would make transformers ask for the package in the code file.
    kernels = importlib.import_module("flash_attn")
    options: dict[str, Any] = {
        "dropout_p": dropout, "softmax_scale": scores.scaling, "causal": True,
        "window_size": window,
    }  # fmt: skip
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor
    if span.is_plain:
        out = kernels.flash_attn_func(query, key, value, **options)
        return out.transpose(1, 2)
    count = key.shape[1]
    parts = span.memo(("flash", count), lambda: _flash_segments(span, count, query.device))
    key, value = (x.flatten(0, 1) for x in (key, value))
    if parts.keys is not None:
        key, value = key.index_select(0, parts.keys), value.index_select(0, parts.keys)
    out = kernels.flash_attn_varlen_func(
        query.flatten(0, 1), key, value, parts.ends_q, parts.ends_k, parts.max_q, parts.max_k,
        **options,
    )  # fmt: skip
    return out.view(query.shape).transpose(1, 2)


class Segments(NamedTuple):
    """Segments of all rows, one after another, as flash-attn takes them.

    `ends_q`, `ends_k` int32 [segments + 1]: where each begins and the last one ends; `max_q`,
    `max_k`: tokens of the longest; `keys`: which of the B * Tk keys are in one, None for all.
    """

    ends_q: Tensor
    ends_k: Tensor
    max_q: int
    max_k: int
    keys: Tensor | None


def _flash_segments(span: Span, count: int, device: torch.device) -> Segments:
    """Segments of a pass over its last `count` key slots.

    A padded query is a segment of its own, and sees itself. Raises UserError for padding between a
    row's tokens: its window counts the padding, that of flash-attn could not.
    """
    marks = span.document if span.valid is None else span.valid
    assert marks is not None
    rows, first = marks.shape[0], span.kv_length - count
    begins = torch.zeros(rows, count, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if span.valid is not None:
        runs = (span.valid[:, 1:] & ~span.valid[:, :-1]).sum(1) + span.valid[:, 0]
        if bool((runs > 1).any()):
            raise UserError(
                "the flash backend takes padding at the ends of a row only, not between its "
                "tokens: choose sdpa"
            )
        padded = ~span.valid[:, first:]
        begins |= padded
        begins[:, 1:] |= padded[:, :-1]
    if span.document is not None:
        begins[:, 1:] |= span.document[:, first + 1 :] != span.document[:, first:-1]
    of = begins.flatten().long().cumsum(0) - 1  # segment of each key
    total = int(of[-1]) + 1
    is_query = torch.arange(first, span.kv_length, device=device) >= span.q_offset
    keys = torch.bincount(of, minlength=total)
    queries = torch.bincount(of, weights=is_query.repeat(rows), minlength=total).long()
    kept = None
    if bool((queries == 0).any()):
        kept = (queries > 0)[of].nonzero()[:, 0]
        keys, queries = keys[queries > 0], queries[queries > 0]
    ends = [
        torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
        for sizes in (queries, keys)
    ]
    return Segments(ends[0], ends[1], int(queries.max()), int(keys.max()), kept)
