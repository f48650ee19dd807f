"""Key/value cache of a fixed size: full heads have a slot for every token, sliding heads a ring.

Shapes: B batch, HKV KV heads of a layer, HG those of a group, T tokens of a pass, N tokens the
cache can hold, R entries of a ring, S sinks, D head dimension, W window. Decoding changes tensors
in place and reads the number of tokens on the device, so torch.compile traces it only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedGroup, CachedStates, HeadLayout, gather_sinks
from bosch.model.cache import GroupCache, SplitCache, SplitCacheLayer, check_removed
from bosch.model.families import decoder_layers
from bosch.model.interface import layouts_of


@dataclass(kw_only=True)
class StaticGroupCache(GroupCache):
    """Full heads: [B, HG, N, D]; a window: [B, HG, S + R, D], the sinks and then a ring.

    The token of slot p is at p modulo R in the ring. R = min(W, N): the W - 1 past keys that a
    query sees and its own. S is at most N - R, since later tokens never leave the window.
    """

    ring: int
    sinks: int


class StaticHybridCacheLayer(SplitCacheLayer):  # type: ignore[no-untyped-call]
    """Fixed-size cache of one layer."""

    is_croppable = False
    is_compileable = True
    supports_early_init = True

    def __init__(self, layout: HeadLayout, max_cache_len: int) -> None:
        super().__init__(layout)
        self.max_cache_len = max_cache_len
        self.length = torch.zeros((), dtype=torch.long)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch, heads, dtype and device of states [B, HKV, T, D]; ignores T."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        for group in self.layout.groups:
            room, ring, sinks = self.max_cache_len, 0, 0
            if group.window is not None:
                ring = min(group.window.size, self.max_cache_len)
                sinks = min(group.window.sinks, self.max_cache_len - ring)
                room = sinks + ring
            keys, values = (
                states.new_zeros(states.shape[0], len(group.heads), room, states.shape[3])
                for states in (key_states, value_states)
            )
            self.groups.append(StaticGroupCache(group, keys, values, ring=ring, sinks=sinks))
        self.length = self.length.to(self.device)
        self.slots = torch.arange(self.max_cache_len, device=self.device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            # CUDA graphs can change tensors in place only at fixed addresses.
            for tensor in (*self.tensors, self.length, self.slots):
                torch._dynamo.mark_static_address(tensor)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all that its queries may see.

        Raises ValueError if a pass of several tokens that is not compiled exceeds the capacity;
        other passes raise torch's error for an index out of range.
        """
        self.check_heads(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        add: Callable[[StaticGroupCache, Tensor, Tensor], CachedGroup]
        if count == 1 or torch.compiler.is_compiling():
            start = self.length.clone()
            steps = start + torch.arange(count, device=key_states.device)
            if not self.layout.has_full:
                # A ring takes any token: make a pass beyond the capacity fail on the device.
                steps = self.slots.index_select(0, steps)
            add = functools.partial(self._add_on_device, start, steps)
        else:
            add = functools.partial(self._add_in_order, int(self.length))
        sinks_and_new, returned = [], []
        for name, states in (("keys", key_states), ("values", value_states)):
            groups = []
            for cached in self.groups:
                new = self.layout.heads_of(states, cached.group)
                groups.append(add(cached, getattr(cached, name), new))
                if cached.sinks:
                    sinks_and_new.append((getattr(cached, name)[:, :, : cached.sinks], new))
            returned.append(CachedStates(groups))
        self.length.add_(count)
        if sinks_and_new:
            returned[0].done = functools.partial(self._keep_sinks, sinks_and_new)
        return returned[0], returned[1]

    def _add_on_device(
        self, start: Tensor, steps: Tensor, cached: StaticGroupCache, past: Tensor, new: Tensor
    ) -> CachedGroup:
        """Add without reading the length on the host: into a full head's tensor or a ring."""
        count, device, ring = new.shape[2], new.device, cached.ring
        if cached.group.window is None:
            past.index_copy_(2, steps, new)
            return CachedGroup(past)
        # One token replaces the one that left the window; several would replace some still seen.
        newest = start if count == 1 else start - 1
        slots = newest - (newest - torch.arange(ring, device=device)) % ring
        recent = past
        if count > 1:
            recent, slots = torch.cat([past, new], dim=2), torch.cat([slots, steps])
        last = min(count, ring)  # never write a place twice: the order is undefined on a GPU
        past.index_copy_(2, cached.sinks + steps[-last:] % ring, new[:, :, -last:])
        return CachedGroup(recent, slots=slots)

    def _add_in_order(
        self, start: int, cached: StaticGroupCache, past: Tensor, new: Tensor
    ) -> CachedGroup:
        """As in a HybridCache: only the tokens so far, in order."""
        end, device, window = start + new.shape[2], new.device, cached.group.window
        if end > self.max_cache_len:
            raise ValueError(
                f"the static cache has room for {self.max_cache_len} tokens and would get {end}: "
                "make a larger one"
            )
        if window is None:
            past[:, :, start:end] = new
            return CachedGroup(past[:, :, :end])
        seen = min(start, window.past)
        recent, sinks = new, None
        if seen:
            places = cached.sinks + torch.arange(start - seen, start, device=device) % cached.ring
            recent = torch.cat([past.index_select(2, places), new], dim=2)
        if cached.sinks and start > seen:
            sinks = past[:, :, : cached.sinks]
        first = max(start, end - cached.ring)
        places = cached.sinks + torch.arange(first, end, device=device) % cached.ring
        past.index_copy_(2, places, new[:, :, first - end :])
        return CachedGroup(recent, sinks)

    def _keep_sinks(
        self, sinks_and_new: Sequence[tuple[Tensor, Tensor]], context: AttentionContext
    ) -> None:
        """Store the sinks among the pass's tokens, which `context` locates after padding."""
        for sinks, new in sinks_and_new:
            count = sinks.shape[2]
            if context.start is None and context.valid is None and context.q_offset >= count:
                continue
            sinks.copy_(gather_sinks(new, sinks, context, count))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Number of tokens so far, a tensor [] on the cache's device."""
        return self.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises ValueError for a positive number, and RuntimeError once the ring has wrapped around,
        unless all tokens are removed: the ring has lost tokens that sliding heads would see again.
        """
        self.check_crop(tokens_to_remove)
        self.length.sub_(min(-tokens_to_remove, int(self.length)))

    def check_crop(self, tokens_to_remove: int) -> None:
        check_removed(tokens_to_remove)
        length = int(self.length)
        some_stay = 0 < -tokens_to_remove < length
        ring = min((window.size for window in self.layout.windows), default=length)
        if some_stay and length > ring:
            raise RuntimeError(
                f"tokens cannot be taken back: of {length} the static cache's sliding heads hold "
                f"the last {ring}; use the dynamic cache"
            )

    def reset(self) -> None:
        self.length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in self.tensors:
            states.copy_(states.index_select(0, beam_idx.to(states.device)))


class StaticHybridCache(SplitCache):
    """Cache for `max_cache_len` tokens, allocated once; sliding heads have at most W + S entries.

    Decoding token by token compiles once, without a graph break.
    """

    def __init__(
        self,
        layouts: Sequence[HeadLayout | None],
        max_cache_len: int,
        states: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(StaticHybridCacheLayer, layouts, states, max_cache_len)

    @classmethod
    def of(cls, model: Any, max_cache_len: int) -> StaticHybridCache:
        """Make an empty cache for a model in search or deploy mode."""
        return cls(layouts_of(model), max_cache_len, decoder_layers(model.config).states)

    @property
    def max_cache_len(self) -> int:
        """Capacity in tokens, transformers' name before 5.20."""
        return int(self.get_max_length())
