"""Which heads of a layer are full and which slide, and how their tensors are taken apart.

Shapes: B batch, T query tokens, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
Search mode and deploy mode differ in this file only: a search layout names heads by index, a deploy
layout has the full heads first, so that both kinds are contiguous slices (BOSCH B.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.window import Window


@dataclass(frozen=True)
class HeadLayout:
    """Full and sliding KV heads of one layer.

    `full` and `sliding` are the head indices, ascending. Raises ValueError when they are no
    partition of the heads.
    """

    full: tuple[int, ...]
    sliding: tuple[int, ...]
    window: Window
    _indices: dict[tuple[str, int, torch.device], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        heads = sorted((*self.full, *self.sliding))
        if heads != list(range(len(heads))) or not heads:
            raise ValueError(f"heads {self.full} and {self.sliding} are no partition of the layer")

    @classmethod
    def search(cls, is_full: Sequence[bool], window: Window) -> HeadLayout:
        """Layout by index: row `is_full` [HKV] of a head mask on unpermuted weights."""
        row = np.asarray(is_full, dtype=bool)
        return cls(
            tuple(np.flatnonzero(row).tolist()),
            tuple(np.flatnonzero(~row).tolist()),
            window,
        )

    @classmethod
    def deploy(cls, num_full: int, num_key_value_heads: int, window: Window) -> HeadLayout:
        """Layout by slices: the first `num_full` heads of permuted weights are full."""
        return cls(tuple(range(num_full)), tuple(range(num_full, num_key_value_heads)), window)

    @property
    def num_key_value_heads(self) -> int:
        return len(self.full) + len(self.sliding)

    @property
    def is_contiguous(self) -> bool:
        """Whether each kind of heads is one slice, in either order."""
        return all(
            not heads or heads[-1] - heads[0] + 1 == len(heads)
            for heads in (self.full, self.sliding)
        )

    def heads_of(self, states: Tensor, kind: str, q_per_kv: int = 1) -> Tensor:
        """The heads of `kind` ("full" or "sliding") of `states` [B, HKV * q_per_kv, T, D].

        A view where the layout is contiguous, a copy elsewhere.
        """
        heads = self.full if kind == "full" else self.sliding
        if len(heads) == self.num_key_value_heads:
            return states
        if self.is_contiguous:
            start = heads[0] * q_per_kv if heads else 0
            return states[:, start : start + len(heads) * q_per_kv]
        return states.index_select(1, self._index(kind, q_per_kv, states.device))

    def merge(self, full: Tensor | None, sliding: Tensor | None, q_per_kv: int) -> Tensor:
        """Put outputs [B, HQ_kind, T, D] of both kinds together: [B, T, HQ, D], contiguous."""
        if sliding is None or full is None:
            whole = full if sliding is None else sliding
            assert whole is not None
            return whole.transpose(1, 2).contiguous()
        outputs = [full.transpose(1, 2), sliding.transpose(1, 2)]
        if self.is_contiguous:
            return torch.cat(outputs if self.full[0] < self.sliding[0] else outputs[::-1], dim=2)
        order = self._index("inverse", q_per_kv, full.device)
        return torch.cat(outputs, dim=2).index_select(2, order)

    def _index(self, kind: str, q_per_kv: int, device: torch.device) -> Tensor:
        """Head indices on `device`: of a kind, or where merged heads are found.

        Made once, except in a compiled pass, which would depend on what was made before.
        """
        if torch.compiler.is_compiling():
            return self._make_index(kind, q_per_kv, device)
        key = (kind, q_per_kv, device)
        if key not in self._indices:
            # Made as an inference tensor it could not serve a later pass with gradients.
            with torch.inference_mode(False):
                self._indices[key] = self._make_index(kind, q_per_kv, device)
        return self._indices[key]

    def _make_index(self, kind: str, q_per_kv: int, device: torch.device) -> Tensor:
        heads = {"full": self.full, "sliding": self.sliding}.get(kind, self.full + self.sliding)
        index = torch.tensor(heads, device=device)[:, None] * q_per_kv
        index = (index + torch.arange(q_per_kv, device=device)).reshape(-1)
        return torch.argsort(index) if kind == "inverse" else index


@dataclass
class CachedStates:
    """Keys or values of one layer as a HybridCache hands them out: split by kind of head.

    `full` [B, HKV_full, Tk, D] holds every slot; `sliding` [B, HKV_sliding, R, D] the last R slots;
    `sinks` [B, HKV_sliding, S, D] the first tokens of each row once they have left `sliding`.
    A ring names the `slots` [R] that it holds, negative where it holds none; `sliding` is then
    [B, HKV_sliding, S + R, D], sinks first. `done` is what to call when the pass is done.
    """

    full: Tensor
    sliding: Tensor
    sinks: Tensor | None = None
    slots: Tensor | None = None
    done: Callable[[AttentionContext], None] | None = None

    def to(self, dtype: torch.dtype) -> CachedStates:
        """The same in another dtype."""
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        full, sliding = self.full.to(dtype), self.sliding.to(dtype)
        return CachedStates(full, sliding, sinks, self.slots, self.done)

    def settle(self, context: AttentionContext) -> None:
        """Tell the cache layer that handed these out that the pass `context` is done with them."""
        if self.done is not None:
            self.done(context)


@dataclass
class SlidingStates:
    """Keys and values of a layer's sliding heads: the last R slots, and sinks that lie before them.

    key, value [B, HKV_sliding, R, D]; sink_key, sink_value [B, HKV_sliding, S, D] or None. Those of
    a ring name its `slots` [R]; key and value are then [B, HKV_sliding, S + R, D], sinks first.
    """

    key: Tensor
    value: Tensor
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None
    slots: Tensor | None = None

    def with_slots(self, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """All keys, all values, and their slots [B or 1, S + R], out of range where none counts.

        A sink that is among the recent keys too must not count twice.
        """
        key, value, slots = self.key, self.value, self.slots
        if slots is None:
            first = context.kv_length - key.shape[2]
            slots = torch.arange(first, context.kv_length, device=key.device)
            if self.sink_key is not None and self.sink_value is not None:
                # Without padding they are slots 0, 1, …: those that are recent too stand last.
                count = min(first, self.sink_key.shape[2]) if context.is_plain else None
                key = torch.cat([self.sink_key[:, :, :count], key], dim=2)
                value = torch.cat([self.sink_value[:, :, :count], value], dim=2)
        sink_count = key.shape[2] - slots.shape[0]
        if not sink_count:
            return key, value, slots[None]
        sinks = context.sink_slots(sink_count, key.device)
        sinks = torch.where(sinks < slots.min(), sinks, context.kv_length)
        return key, value, torch.cat([sinks, slots.expand(sinks.shape[0], -1)], dim=1)


@dataclass
class FullStates:
    """Keys and values of a layer's full heads, [B, HKV_full, Tk, D]."""

    key: Tensor
    value: Tensor


def split_states(
    key: Tensor | CachedStates, value: Tensor | CachedStates, layout: HeadLayout
) -> tuple[FullStates | None, SlidingStates | None]:
    """Keys and values by kind of head; None for a kind the layer has no head of."""
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        full = FullStates(key.full, value.full) if layout.full else None
        sliding = SlidingStates(key.sliding, value.sliding, key.sinks, value.sinks, key.slots)
        return full, sliding if layout.sliding else None
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    keys = [layout.heads_of(key, kind) for kind in ("full", "sliding")]
    values = [layout.heads_of(value, kind) for kind in ("full", "sliding")]
    return (
        FullStates(keys[0], values[0]) if layout.full else None,
        SlidingStates(keys[1], values[1]) if layout.sliding else None,
    )


def gather_sinks(
    recent: Tensor, earlier: Tensor | None, context: AttentionContext, sinks: int
) -> Tensor:
    """States of each row's first `sinks` real tokens, [B, HKV_sliding, S, D].

    Taken from `recent` (the last R slots) where they are there, else from `earlier`, which holds
    those that have left. A row's entry for a token it does not have yet is arbitrary.
    """
    first = context.end - recent.shape[2]
    slots = context.sink_slots(sinks, recent.device)
    inside = (slots - first).clamp(0, recent.shape[2] - 1)[:, None, :, None]
    sinks_of_recent = recent.gather(2, inside.expand(*recent.shape[:2], -1, recent.shape[3]))
    if earlier is None:
        return sinks_of_recent
    return torch.where((slots >= first)[:, None, :, None], sinks_of_recent, earlier)
