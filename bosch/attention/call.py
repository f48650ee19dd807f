"""One call of attention: of a layer, and of one group of its heads.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV KV heads, HG KV heads of a group, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedStates, HeadLayout
from bosch.attention.logit_transform import LogitTransform
from bosch.window import Window


class GroupCall(NamedTuple):
    """Attention of one group of heads: full heads (`window` is None) or those of a window.

    query [B, HQ_group, T, D]; key, value [B, HG, R, D] are the last R slots. sink_key, sink_value
    [B, HG, S, D] or None are sinks before them. For a ring, `slots` [R] names its slots; key and
    value are then [B, HG, S + R, D], sinks first.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    window: Window | None
    context: AttentionContext
    transform: LogitTransform
    dropout: float
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None
    slots: Tensor | None = None

    def with_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and slots [B or 1, S + R]; a slot outside 0 .. Tk - 1 hides its key."""
        key, value, slots, context = self.key, self.value, self.slots, self.context
        if slots is None:
            # A cache of fixed size may return more keys than the pass has slots.
            first = max(0, context.kv_length - key.shape[2])
            slots = torch.arange(first, first + key.shape[2], device=key.device)
            if self.sink_key is not None and self.sink_value is not None:
                # Without padding sinks are slots 0, 1, …; those among the recent keys come last.
                count = min(first, self.sink_key.shape[2]) if context.is_plain else None
                key = torch.cat([self.sink_key[:, :, :count], key], dim=2)
                value = torch.cat([self.sink_value[:, :, :count], value], dim=2)
        sink_count = key.shape[2] - slots.shape[0]
        if not sink_count:
            return key, value, slots[None]
        sinks = context.sink_slots(sink_count, key.device)
        sinks = torch.where(sinks < slots.min(), sinks, context.kv_length)
        return key, value, torch.cat([sinks, slots.expand(sinks.shape[0], -1)], dim=1)


class AttentionCall(NamedTuple):
    """Attention of a layer, by one of `BACKENDS`.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D], or the states that a HybridCache returned.
    """

    query: Tensor
    key: Tensor | CachedStates
    value: Tensor | CachedStates
    layout: HeadLayout
    context: AttentionContext
    transform: LogitTransform
    backend: str = "sdpa"
    dropout: float = 0.0

    def autocast(self) -> AttentionCall:
        """The call in autocast's dtype, if autocast is on; norms leave queries and keys in float32.

        torch's attention would convert the overlapping bands instead.
        """
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        key, value = self.key.to(dtype), self.value.to(dtype)
        return AttentionCall(self.query.to(dtype), key, value, *self[3:])

    def by_group(self, attend: Callable[[GroupCall], Tensor]) -> Tensor:
        """Outputs [B, HQ_group, T, D] of `attend` for each group, joined to [B, T, HQ, D]."""
        layout, key, value = self.layout, self.key, self.value
        q_per_kv = self.query.shape[1] // layout.num_key_value_heads
        outputs = []
        for number, group in enumerate(layout.groups):
            if isinstance(key, CachedStates) and isinstance(value, CachedStates):
                keys, values = key.groups[number], value.groups[number]
                states = keys.recent, values.recent
                sinks = keys.sinks, values.sinks, keys.slots
            else:
                assert isinstance(key, Tensor) and isinstance(value, Tensor)
                states = layout.heads_of(key, group), layout.heads_of(value, group)
                sinks = None, None, None
            heads = layout.heads_of(self.query, group, q_per_kv)
            transform = self.transform.of(layout, group, q_per_kv)
            group_call = GroupCall(
                heads, *states, group.window, self.context, transform, self.dropout, *sinks
            )
            outputs.append(attend(group_call))
        return layout.merge(outputs, q_per_kv)
