"""What becomes of the products of queries and keys on their way through the softmax.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bosch.attention.layout import HeadLayout


@dataclass(frozen=True, eq=False)
class Scores:
    """How attention scores are made: s = scaling * q·k, then what some families add to it.

    With `softcap` c, s is c * tanh(s / c) (Gemma 2). `head_logits` [HQ] join each row of their head
    in the softmax and go with no value: what they take is lost (GPT-OSS calls them sinks).
    """

    scaling: float
    softcap: float | None = None
    head_logits: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels can compute them."""
        return self.softcap is None and self.head_logits is None

    def of(self, layout: HeadLayout, kind: str, q_per_kv: int) -> Scores:
        """Those of the heads of `kind`, "full" or "sliding"."""
        if self.head_logits is None:
            return self
        kept = layout.heads_of(self.head_logits[None, :, None, None], kind, q_per_kv)
        return replace(self, head_logits=kept.flatten())


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention as it is written down: [B, HQ, T, D], in float32 at least.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D]; `seen` broadcasts to [B, HQ, T, Tk]. B and HQ
    may be flattened into each other, B first.
    """
    q_per_kv = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(q_per_kv, dim=1) for x in (key, value))
    products = query @ key.transpose(2, 3)
    found = (products if query.dtype == torch.float64 else products.float()) * scores.scaling
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if seen is not None:
        found = found.masked_fill(~seen, float("-inf"))
    if scores.head_logits is not None:
        logits = scores.head_logits.to(found.dtype)
        logits = logits.repeat(query.shape[1] // len(logits))[None, :, None, None]
        found = torch.cat([found, logits.expand(*found.shape[:3], 1)], dim=3)
    weights = found.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return weights @ value
