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
    [B, HG, S, D] or None are sinks before them. `slots` [R] names the slots if only the device
    knows them; negative ones are empty.
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
        count = 0 if self.sink_key is None else self.sink_key.shape[2]
        if slots is None:
            first = context.kv_length - key.shape[2]
            slots = torch.arange(first, context.kv_length, device=key.device)
            if context.is_plain:  # sinks are slots 0, 1, …; those among the recent keys come last
                count = min(first, count)
        if not count or self.sink_key is None or self.sink_value is None:
            return key, value, slots[None]
        key = torch.cat([self.sink_key[:, :, :count], key], dim=2)
        value = torch.cat([self.sink_value[:, :, :count], value], dim=2)
        sinks = context.sink_slots(count, key.device)
        sinks = torch.where(sinks < slots[0], sinks, context.kv_length)
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
        layout, key, value, context = self.layout, self.key, self.value, self.context
        q_per_kv = self.query.shape[1] // layout.num_key_value_heads
        outputs = []
        for number, group in enumerate(layout.groups):
            if isinstance(key, CachedStates) and isinstance(value, CachedStates):
                keys, values = (x.groups[number].seen(context, group.window) for x in (key, value))
                states, slots, count = (keys.recent, values.recent), None, keys.recent.shape[2]
                if context.start is not None and group.window is not None:
                    slots = torch.arange(-count, 0, device=self.query.device) + context.end
                sinks = keys.sinks, values.sinks, slots
            else:
                assert isinstance(key, Tensor) and isinstance(value, Tensor)
                states = layout.heads_of(key, group), layout.heads_of(value, group)
                sinks = None, None, None
            heads = layout.heads_of(self.query, group, q_per_kv)
            transform = self.transform.of(layout, group, q_per_kv)
            group_call = GroupCall(
                heads, *states, group.window, context, transform, self.dropout, *sinks
            )
            outputs.append(attend(group_call))
        return layout.merge(outputs, q_per_kv)
