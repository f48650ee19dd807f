"""The reference backend: dense attention with one mask for each group of heads.

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
    """Attention of all groups of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    queries = context.query_slots(query.device)
    outputs = []
    for group, states in zip(layout.groups, split_states(key, value, layout), strict=True):
        keys, values, slots = states.with_slots(context)
        outputs.append(
            dense_attention(
                layout.heads_of(query, group, q_per_kv), keys, values,
                context.visible(queries, slots, group.window)[:, None],
                transform.of(layout, group, q_per_kv), dropout,
            )
        )  # fmt: skip
    return layout.merge(outputs, q_per_kv)


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
    queries, length = context.query_slots(query.device), context.kv_length
    outputs = []
    for group, states in zip(layout.groups, split_states(key, key, layout), strict=True):
        keys, _, slots = states.with_slots(context)
        near = dense_weights(
            layout.heads_of(query, group, q_per_kv), keys,
            context.visible(queries, slots, group.window)[:, None],
            transform.of(layout, group, q_per_kv),
        )  # fmt: skip
        # Slots out of range, of which none is seen, all go into one more column.
        places = torch.where((slots >= 0) & (slots < length), slots, length)[:, None, None]
        weights = near.new_zeros(*near.shape[:3], length + 1)
        weights.scatter_add_(3, places.expand_as(near), near)
        outputs.append(weights[..., :length])
    return layout.merge(outputs, q_per_kv).transpose(1, 2)
