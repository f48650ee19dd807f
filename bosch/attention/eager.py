"""The oracle: dense attention, one mask for each kind of head, no trick.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bosch.attention.layout import CachedStates, HeadLayout, split_states
from bosch.attention.scores import Scores, dense_attention
from bosch.attention.span import Span


def eager_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    span: Span,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of both kinds of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    full, sliding = split_states(key, value, layout)
    queries = span.query_slots(query.device)
    out_full = out_sliding = None
    if full is not None:
        keys = torch.arange(full.key.shape[2], device=query.device)[None]
        out_full = dense_attention(
            layout.heads_of(query, "full", q_per_kv), full.key, full.value,
            span.visible(queries, keys)[:, None], scores.of(layout, "full", q_per_kv), dropout,
        )  # fmt: skip
    if sliding is not None:
        key, value, keys = sliding.with_slots(span)
        seen = span.visible(queries, keys, layout.window_size, layout.sinks)
        query = layout.heads_of(query, "sliding", q_per_kv)
        sliding_scores = scores.of(layout, "sliding", q_per_kv)
        out_sliding = dense_attention(query, key, value, seen[:, None], sliding_scores, dropout)
    return layout.merge(out_full, out_sliding, q_per_kv)
