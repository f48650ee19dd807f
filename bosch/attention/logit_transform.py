"""Attention logits (scale, soft-cap, extra logit per head), and dense attention with them.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bosch.attention.layout import HeadGroup, HeadLayout


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """Attention logits s = scaling * q·k, and the changes of some families before the softmax.

    With `softcap` c, s becomes c * tanh(s / c) (Gemma 2). `head_logits` [HQ] (GPT-OSS's sinks) are
    extra logits without a value, one per head.
    """

    scaling: float
    softcap: float | None = None
    head_logits: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels can compute it."""
        return self.softcap is None and self.head_logits is None

    def of(self, layout: HeadLayout, group: HeadGroup, q_per_kv: int) -> LogitTransform:
        """The transform of one group of heads."""
        if self.head_logits is None:
            return self
        head_logits = layout.heads_of(self.head_logits[None, :, None, None], group, q_per_kv)
        return replace(self, head_logits=head_logits.flatten())


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    transform: LogitTransform,
    dropout: float = 0.0,
) -> Tensor:
    """Attention [B, HQ, T, D] with all logits in memory, and the softmax at least in float32.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D]; `visible` broadcasts to [B, HQ, T, Tk]. Rows
    may also be flattened into heads: query [1, B * HQ, T, D], key and value [1, B * HKV, Tk, D].
    """
    value = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    weights = dense_weights(query, key, visible, transform).to(value.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return weights @ value


def dense_weights(
    query: Tensor, key: Tensor, visible: Tensor | None, transform: LogitTransform
) -> Tensor:
    """The softmax of the logits over the keys, [B, HQ, T, Tk], as in `dense_attention`."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    products = query @ key.transpose(2, 3)
    logits = (products if query.dtype == torch.float64 else products.float()) * transform.scaling
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if transform.head_logits is not None:
        extra = transform.head_logits.to(logits.dtype)
        extra = extra.repeat(query.shape[1] // len(extra))[None, :, None, None]
        logits = torch.cat([logits, extra.expand(*logits.shape[:3], 1)], dim=3)
    return logits.softmax(dim=-1)[..., : key.shape[2]]
