"""The reference backend: dense attention with one mask for each kind of head.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedStates, HeadLayout, split_states
from bosch.attention.logit_transform import LogitTransform, dense_attention, dense_weights


def eager_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    context: AttentionContext,
    transform: LogitTransform,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of both kinds of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    full, sliding = split_states(key, value, layout)
    queries = context.query_slots(query.device)
    out_full = out_sliding = None
    if full is not None:
        keys = torch.arange(full.key.shape[2], device=query.device)[None]
        out_full = dense_attention(
            layout.heads_of(query, "full", q_per_kv), full.key, full.value,
            context.visible(queries, keys)[:, None], transform.of(layout, "full", q_per_kv),
            dropout,
        )  # fmt: skip
    if sliding is not None:
        key, value, keys = sliding.with_slots(context)
        visible = context.visible(queries, keys, layout.window)
        query = layout.heads_of(query, "sliding", q_per_kv)
        sliding_transform = transform.of(layout, "sliding", q_per_kv)
        out_sliding = dense_attention(
            query, key, value, visible[:, None], sliding_transform, dropout
        )
    return layout.merge(out_full, out_sliding, q_per_kv)


def eager_weights(
    query: Tensor,
    key: Tensor | CachedStates,
    layout: HeadLayout,
    context: AttentionContext,
    transform: LogitTransform,
) -> Tensor:
    """Attention weights of each query head over every key slot: [B, HQ, T, Tk], before dropout.

    0 where a head does not see a slot, whether or not a cache still holds it.
    """
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    full, sliding = split_states(key, key, layout)
    queries, length = context.query_slots(query.device), context.kv_length
    of_full = of_sliding = None
    if full is not None:
        keys = torch.arange(full.key.shape[2], device=query.device)[None]
        visible = context.visible(queries, keys)[:, None]
        of_full = dense_weights(
            layout.heads_of(query, "full", q_per_kv), full.key, visible,
            transform.of(layout, "full", q_per_kv),
        )  # fmt: skip
    if sliding is not None:
        states, _, keys = sliding.with_slots(context)
        visible = context.visible(queries, keys, layout.window)[:, None]
        near = dense_weights(
            layout.heads_of(query, "sliding", q_per_kv), states, visible,
            transform.of(layout, "sliding", q_per_kv),
        )  # fmt: skip
        # Slots out of range, of which none is seen, all go into one more column.
        places = torch.where((keys >= 0) & (keys < length), keys, length)[:, None, None]
        of_sliding = near.new_zeros(*near.shape[:3], length + 1)
        of_sliding.scatter_add_(3, places.expand_as(near), near)
        of_sliding = of_sliding[..., :length]
    return layout.merge(of_full, of_sliding, q_per_kv).transpose(1, 2)
