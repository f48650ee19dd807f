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

from bosch.attention.span import Span
from bosch.windows import check_window


@dataclass(frozen=True)
class HeadLayout:
    """Full and sliding KV heads of one layer.

    `full` and `sliding` are the head indices, ascending; window_size and sinks as in
    `bosch.windows`. Raises ValueError when the indices are no partition of the heads.
    """

    full: tuple[int, ...]
    sliding: tuple[int, ...]
    window_size: int
    sinks: int = 0
    _indices: dict[tuple[str, int, torch.device], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        check_window(self.window_size, self.sinks)
        heads = sorted((*self.full, *self.sliding))
        if heads != list(range(len(heads))) or not heads:
            raise ValueError(f"heads {self.full} and {self.sliding} are no partition of the layer")

    @classmethod
    def search(cls, is_full: Sequence[bool], window_size: int, sinks: int = 0) -> HeadLayout:
        """Layout by index: row `is_full` [HKV] of a head mask on unpermuted weights."""
        row = np.asarray(is_full, dtype=bool)
        return cls(
            tuple(np.flatnonzero(row).tolist()),
            tuple(np.flatnonzero(~row).tolist()),
            window_size,
            sinks,
        )

    @classmethod
    def deploy(
        cls, num_full: int, num_key_value_heads: int, window_size: int, sinks: int = 0
    ) -> HeadLayout:
        """Layout by slices: the first `num_full` heads of permuted weights are full."""
        return cls(
            tuple(range(num_full)),
            tuple(range(num_full, num_key_value_heads)),
            window_size,
            sinks,
        )

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
        parts = [full.transpose(1, 2), sliding.transpose(1, 2)]
        if self.is_contiguous:
            return torch.cat(parts if self.full[0] < self.sliding[0] else parts[::-1], dim=2)
        order = self._index("inverse", q_per_kv, full.device)
        return torch.cat(parts, dim=2).index_select(2, order)

    def _index(self, kind: str, q_per_kv: int, device: torch.device) -> Tensor:
        """Head indices on `device`: of a kind, or where merged heads are found.

        Made once, except in a compiled pass, which would depend on what was made before.
        """
        found = None
        if not torch.compiler.is_compiling():
            found = self._indices.get((kind, q_per_kv, device))
        if found is None:
            heads = {"full": self.full, "sliding": self.sliding}.get(kind, self.full + self.sliding)
            index = torch.tensor(heads, device=device)[:, None] * q_per_kv
            index = (index + torch.arange(q_per_kv, device=device)).reshape(-1)
            found = torch.argsort(index) if kind == "inverse" else index
            if not torch.compiler.is_compiling():
                self._indices[kind, q_per_kv, device] = found
        return found


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
    done: Callable[[Span], None] | None = None

    def to(self, dtype: torch.dtype) -> CachedStates:
        """The same in another dtype."""
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        full, sliding = self.full.to(dtype), self.sliding.to(dtype)
        return CachedStates(full, sliding, sinks, self.slots, self.done)

    def settle(self, span: Span) -> None:
        """Tell the cache layer that handed these out that the pass `span` is done with them."""
        if self.done is not None:
            self.done(span)


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

    def with_slots(self, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        """All keys, all values, and their slots [B or 1, S + R], out of range where none counts.

        A sink that is among the recent keys too must not count twice.
        """
        key, value, slots = self.key, self.value, self.slots
        if slots is None:
            first = span.kv_length - key.shape[2]
            slots = torch.arange(first, span.kv_length, device=key.device)
            if self.sink_key is not None and self.sink_value is not None:
                # Without padding they are slots 0, 1, …: those that are recent too stand last.
                kept = min(first, self.sink_key.shape[2]) if span.is_plain else None
                key = torch.cat([self.sink_key[:, :, :kept], key], dim=2)
                value = torch.cat([self.sink_value[:, :, :kept], value], dim=2)
        count = key.shape[2] - slots.shape[0]
        if not count:
            return key, value, slots[None]
        sinks = span.sink_slots(count, key.device)
        sinks = torch.where(sinks < slots.min(), sinks, span.kv_length)
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


def gather_sinks(recent: Tensor, kept: Tensor | None, span: Span, sinks: int) -> Tensor:
    """States of each row's first `sinks` real tokens, [B, HKV_sliding, S, D].

    Taken from `recent` (the last R slots) where they are there, else from `kept`, which holds those
    that left earlier. A row's entry for a token it does not have yet is arbitrary.
    """
    first = span.end - recent.shape[2]
    slots = span.sink_slots(sinks, recent.device)
    inside = (slots - first).clamp(0, recent.shape[2] - 1)[:, None, :, None]
    found = recent.gather(2, inside.expand(*recent.shape[:2], -1, recent.shape[3]))
    if kept is None:
        return found
    return torch.where((slots >= first)[:, None, :, None], found, kept)
