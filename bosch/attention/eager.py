"""The reference backend: dense attention with one mask for each group of heads.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall, GroupCall
from bosch.attention.logit_transform import dense_attention, dense_weights


def eager_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""

    def attend(group: GroupCall) -> Tensor:
        keys, values, slots = group.with_slots()
        visible = _visible(group, slots)
        return dense_attention(group.query, keys, values, visible, group.transform, group.dropout)

    return call.by_group(attend)


def eager_weights(call: AttentionCall) -> Tensor:
    """Weights [B, HQ, T, Tk] before dropout; 0 for unseen slots, whether cached or not."""
    length = call.context.kv_length

    def weights(group: GroupCall) -> Tensor:
        keys, _, slots = group.with_slots()
        near = dense_weights(group.query, keys, _visible(group, slots), group.transform)
        # Slots out of range, which no query sees, go into an extra column.
        places = torch.where((slots >= 0) & (slots < length), slots, length)[:, None, None]
        whole = near.new_zeros(*near.shape[:3], length + 1)
        return whole.scatter_add_(3, places.expand_as(near), near)[..., :length]

    return call.by_group(weights).transpose(1, 2)


def _visible(group: GroupCall, slots: Tensor) -> Tensor:
    queries = group.context.query_slots(group.query.device)
    return group.context.visible(queries, slots, group.window)[:, None]
