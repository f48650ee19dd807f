"""Questions behind one text: a row holds the text once, then all questions that are asked about it.

A question sees the text and itself. Its positions, and so its distances, go on where the text ends:
it is computed as if it followed the text alone. The texts' own attention is the backend's, as in
rows without branches; the few slots behind them are computed under a mask.

R rows, T slots of a row, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.attention import HeadLayout, Span, hybrid_attention

# Few kernels take a mask, and without one all scores are held at once: that many at most.
_MOST_SCORES = 2**27


@dataclass(frozen=True, eq=False)
class Branches:
    """Where texts and questions are in the rows of a batch.

    The first `trunk` slots hold the texts, padded; the questions stand behind them. `positions`
    [R, T] are places in a question's own sequence. `parts` [R, T] is 0 in the text, the question's
    number from 1 in a question, and -1 at padding.
    """

    trunk: int
    positions: Tensor
    parts: Tensor

    @property
    def tail(self) -> int:
        """Slots behind the texts."""
        return self.parts.shape[1] - self.trunk

    def visible(
        self, queries: Tensor, keys: Tensor, window: int | None = None, sinks: int = 0
    ) -> Tensor:
        """Whether query slots [R, m] see key slots [n]: bool [R, m, n].

        Full heads have window None. Every query sees itself.
        """
        positions, parts = self.positions.to(queries.device), self.parts.to(queries.device)
        part, key_part = parts.gather(1, queries)[:, :, None], parts[:, None, keys]
        key_position = positions[:, None, keys]
        distance = positions.gather(1, queries)[:, :, None] - key_position
        seen = (distance >= 0) & ((key_part == 0) | (key_part == part))
        if window is not None:
            seen = seen & ((distance < window) | (key_position < sinks))
        return seen

    def reach(self, window: int, sinks: int) -> list[int]:
        """Slots of all keys that some slot behind the texts sees with a sliding head."""
        texts = (self.parts == 0).sum(dim=1)
        first = max(0, int(texts.min()) - window + 1)
        return [*range(min(first, sinks)), *range(first, self.parts.shape[1])]


def branched_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: HeadLayout,
    branches: Branches | None,
    span: Span | None,
    scaling: float,
    backend: str,
) -> Tensor:
    """`hybrid_attention` of whole sequences, [R, T, HQ, D], whose rows may have branches.

    query [R, HQ, T, D]; key, value [R, HKV, T, D]. `span` counts where there are no branches.
    """
    if branches is None:
        return hybrid_attention(query, key, value, layout, span, scaling=scaling, backend=backend)
    trunk = branches.trunk
    texts = hybrid_attention(
        query[:, :, :trunk], key[:, :, :trunk], value[:, :, :trunk], layout,
        scaling=scaling, backend=backend,
    )  # fmt: skip
    tail, q_per_kv = query[:, :, trunk:], query.shape[1] // layout.num_key_value_heads
    slots = torch.arange(trunk, query.shape[2], device=query.device).expand(len(query), -1)
    full = sliding = None
    if layout.full:
        keys = torch.arange(query.shape[2], device=query.device)
        seen = branches.visible(slots, keys)
        k, v = (layout.heads_of(x, "full") for x in (key, value))
        full = seen_attention(layout.heads_of(tail, "full", q_per_kv), k, v, seen, scaling)
    if layout.sliding:
        keys = torch.tensor(branches.reach(layout.window_size, layout.sinks), device=query.device)
        seen = branches.visible(slots, keys, layout.window_size, layout.sinks)
        k, v = (layout.heads_of(x, "sliding")[:, :, keys] for x in (key, value))
        sliding = seen_attention(layout.heads_of(tail, "sliding", q_per_kv), k, v, seen, scaling)
    return torch.cat([texts, layout.merge(full, sliding, q_per_kv)], dim=1)


def seen_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float
) -> Tensor:
    """Attention of few queries [R, HQ, m, D] that see what `seen` [R, m, n] says, same shape."""
    step = max(1, _MOST_SCORES // (query.shape[1] * seen[0].numel()))
    outputs = [
        F.scaled_dot_product_attention(
            query[rows], key[rows], value[rows], attn_mask=seen[rows, None], scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for rows in (slice(first, first + step) for first in range(0, len(query), step))
    ]  # fmt: skip
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
