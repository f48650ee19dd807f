"""Which heads of a layer see which keys, and how their tensors are split into groups.

Shapes: B batch, T query tokens, Tk keys, HQ query heads, HKV key/value heads of a layer, HG of a
group, D head dimension. Search mode and deploy mode differ only here: a search layout names heads
by index; in a deploy layout groups are contiguous slices (BOSCH B.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.window import Window


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of a layer, ascending, with the same window, or None for full heads."""

    heads: tuple[int, ...]
    window: Window | None = None

    @property
    def is_slice(self) -> bool:
        """Whether the heads are adjacent."""
        return self.heads[-1] - self.heads[0] + 1 == len(self.heads)


@dataclass(frozen=True)
class HeadLayout:
    """The heads of one layer in groups: full ones first, then from the widest window down.

    `windows` are the windows in use, in this order; `sinks` is the number of sinks of sliding
    heads. The layout is contiguous if each group is a slice, in any order. Raises ValueError when
    the groups are not a partition of the heads, two have the same window, or their sinks differ.
    """

    groups: tuple[HeadGroup, ...]
    # Fields instead of cached_property, which would break the graph of a compiled search.
    num_key_value_heads: int = field(init=False)
    windows: tuple[Window, ...] = field(init=False)
    sinks: int = field(init=False)
    has_full: bool = field(init=False)
    is_contiguous: bool = field(init=False)
    _places: tuple[int, ...] = field(init=False)  # group numbers in order of their first heads
    _indices: dict[tuple[Window | str | None, int, torch.device], Tensor] = field(
        default_factory=dict, compare=False
    )

    def __post_init__(self) -> None:
        heads = sorted(head for group in self.groups for head in group.heads)
        if not heads or heads != list(range(len(heads))):
            named = " and ".join(str(group.heads) for group in self.groups)
            raise ValueError(f"heads {named} are no partition of the layer")
        windows = [group.window for group in self.groups]
        if len(set(windows)) < len(windows) or len({w.sinks for w in windows if w}) > 1:
            raise ValueError(f"groups of heads must differ in window and not in sinks: {windows}")
        sliding_windows = tuple(window for window in windows if window is not None)
        for name, value in {
            "num_key_value_heads": len(heads),
            "windows": sliding_windows,
            "sinks": sliding_windows[0].sinks if sliding_windows else 0,
            "has_full": len(sliding_windows) < len(windows),
            "is_contiguous": all(group.is_slice for group in self.groups),
            "_places": tuple(sorted(range(len(windows)), key=lambda i: self.groups[i].heads)),
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def search(cls, windows: Sequence[Window | None]) -> HeadLayout:
        """Layout from each KV head's window (None: full), on weights in their original order."""
        kinds = sorted(set(windows), key=lambda w: float("-inf") if w is None else -w.size)
        heads = [tuple(h for h, w in enumerate(windows) if w == kind) for kind in kinds]
        return cls(tuple(map(HeadGroup, heads, kinds)))

    @classmethod
    def deploy(cls, counts: Mapping[Window | None, int]) -> HeadLayout:
        """Layout from the number of KV heads with each window (None: full), in this order."""
        ends = pairwise(accumulate(counts.values(), initial=0))
        heads = (tuple(range(*end)) for end in ends)
        return cls(tuple(HeadGroup(h, w) for w, h in zip(counts, heads, strict=True) if h))

    def heads_of(self, states: Tensor, group: HeadGroup, q_per_kv: int = 1) -> Tensor:
        """Heads of `group` in [B, HKV * q_per_kv, T, D]: a view if contiguous, else a copy."""
        if len(self.groups) == 1:
            return states
        if self.is_contiguous:
            start = group.heads[0] * q_per_kv
            return states[:, start : start + len(group.heads) * q_per_kv]
        return states.index_select(1, self._index(group, q_per_kv, states.device))

    def merge(self, outputs: Sequence[Tensor], q_per_kv: int) -> Tensor:
        """Join the outputs [B, HQ_group, T, D] of all groups to [B, T, HQ, D], contiguous."""
        if len(outputs) == 1:
            return outputs[0].transpose(1, 2).contiguous()
        transposed = [output.transpose(1, 2) for output in outputs]
        if self.is_contiguous:
            return torch.cat([transposed[place] for place in self._places], dim=2)
        order = self._index(None, q_per_kv, outputs[0].device)
        return torch.cat(transposed, dim=2).index_select(2, order)

    def _index(self, group: HeadGroup | None, q_per_kv: int, device: torch.device) -> Tensor:
        """Head indices on `device`: those of a group, or for None the places of heads when merging.

        Cached, except in a compiled pass, which must not depend on earlier calls.
        """
        if torch.compiler.is_compiling():
            return self._make_index(group, q_per_kv, device)
        key = ("merged" if group is None else group.window, q_per_kv, device)
        if key not in self._indices:
            # Not an inference tensor, which autograd could not use later.
            with torch.inference_mode(False):
                self._indices[key] = self._make_index(group, q_per_kv, device)
        return self._indices[key]

    def _make_index(self, group: HeadGroup | None, q_per_kv: int, device: torch.device) -> Tensor:
        groups = self.groups if group is None else (group,)
        heads = [head for group in groups for head in group.heads]
        index = torch.tensor(heads, device=device)[:, None] * q_per_kv
        index = (index + torch.arange(q_per_kv, device=device)).reshape(-1)
        return torch.argsort(index) if group is None else index


@dataclass
class CachedGroup:
    """Keys or values of one group of heads, as a cache returns them.

    `recent` [B, HG, R, D] holds the last R slots, for full heads all; `sinks` [B, HG, S, D] holds
    the first tokens of each row once they have left `recent`. In a cache of fixed size, slots after
    the last (full heads) or before the first (sliding heads) may be empty.
    """

    recent: Tensor
    sinks: Tensor | None = None

    def to(self, dtype: torch.dtype) -> CachedGroup:
        """The same in another dtype."""
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return CachedGroup(self.recent.to(dtype), sinks)

    def seen(self, context: AttentionContext, window: Window | None) -> CachedGroup:
        """Without empty slots, unless only the device knows them; and without sinks among them."""
        length = context.kv_length
        recent = self.recent[:, :, :length] if window is None else self.recent[:, :, -length:]
        is_whole = context.start is None and recent.shape[2] == length
        return CachedGroup(recent, None if is_whole else self.sinks)


@dataclass
class CachedStates:
    """A layer's keys or values by group, of a HybridCache; `done` is called after the pass."""

    groups: list[CachedGroup]
    done: Callable[[AttentionContext], None] | None = None

    def to(self, dtype: torch.dtype) -> CachedStates:
        """The same in another dtype, without `done`."""
        return CachedStates([group.to(dtype) for group in self.groups])

    def settle(self, context: AttentionContext) -> None:
        """Call `done`: the pass `context` no longer needs the states."""
        if self.done is not None:
            self.done(context)


def gather_sinks(
    recent: Tensor, earlier: Tensor | None, context: AttentionContext, sinks: int
) -> Tensor:
    """States of each row's first `sinks` real tokens, [B, HG, S, D].

    From `recent` (the last R slots), or `earlier` once they left it; arbitrary for missing tokens.
    """
    first = context.end - recent.shape[2]
    slots = context.sink_slots(sinks, recent.device)
    inside = (slots - first).clamp(0, recent.shape[2] - 1)[:, None, :, None]
    sinks_of_recent = recent.gather(2, inside.expand(*recent.shape[:2], -1, recent.shape[3]))
    if earlier is None:
        return sinks_of_recent
    return torch.where((slots >= first)[:, None, :, None], sinks_of_recent, earlier)
