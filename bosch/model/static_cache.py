"""Key/value cache of a fixed size: full heads have room for all tokens, sliding heads a ring.

Shapes: B batch, HF full and HS sliding KV heads of a layer, T tokens of a pass, N tokens the cache
has room for, R entries of the ring, S sinks, D head dimension, W window. Decoding changes tensors
in place and reads the number of tokens seen from the device, so that torch.compile traces it once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedStates, HeadLayout, gather_sinks
from bosch.model.cache import SplitCacheLayer, cache_layer, held_bytes
from bosch.model.families import decoder_layers
from bosch.model.interface import layouts_of


class StaticHybridCacheLayer(SplitCacheLayer):  # type: ignore[no-untyped-call]
    """Fixed-size cache of one layer.

    `full_*` [B, HF, N, D]; `near_*` [B, HS, S + R, D]: the sinks, then a ring in which the token of
    slot p stands at p modulo R. R is W, or N where that is less: the W - 1 past keys that a query
    sees and its own. S is at most N - R: what stands later in a text never leaves the window.
    """

    is_croppable = False
    is_compileable = True
    supports_early_init = True
    tensor_names = ("full_keys", "full_values", "near_keys", "near_values")

    def __init__(self, layout: HeadLayout, max_cache_len: int) -> None:
        super().__init__(layout)
        self.max_cache_len = max_cache_len
        self.ring = min(layout.window.size, max_cache_len)
        self.sinks = min(layout.window.sinks, max_cache_len - self.ring)
        self.length = torch.zeros((), dtype=torch.long)
        self.full_keys: Tensor | None = None
        self.full_values: Tensor | None = None
        self.near_keys: Tensor | None = None
        self.near_values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch, heads, dtype and device of [B, HKV, T, D]; T does not matter."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        for kind, heads, room in (
            ("full", self.layout.full, self.max_cache_len),
            ("near", self.layout.sliding, self.sinks + self.ring),
        ):
            for name, states in (("keys", key_states), ("values", value_states)):
                shape = (states.shape[0], len(heads), room, states.shape[3])
                setattr(self, f"{kind}_{name}", states.new_zeros(shape))
        self.length = self.length.to(self.device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            # CUDA graphs may change these tensors in place only where their addresses are fixed.
            for name in (*self.tensor_names, "length"):
                torch._dynamo.mark_static_address(getattr(self, name))

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all that its queries may see.

        Raises ValueError when a pass of several tokens, not compiled, goes past the end.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        on_device = count == 1 or torch.compiler.is_compiling()
        add = self._add_on_device if on_device else self._add_in_order
        start = self.length.clone() if on_device else int(self.length)
        news, states_of_pass = [], []
        for name, states in (("keys", key_states), ("values", value_states)):
            new = self.layout.heads_of(states, "sliding")
            full, near = getattr(self, f"full_{name}"), getattr(self, f"near_{name}")
            news.append(new)
            states_of_pass.append(add(start, full, near, self.layout.heads_of(states, "full"), new))
        self.length.add_(count)
        if self.sinks and self.layout.sliding:
            states_of_pass[0].done = functools.partial(self._keep_sinks, news)
        return states_of_pass[0], states_of_pass[1]

    def _add_on_device(
        self, start: Any, full: Tensor, near: Tensor, new_full: Tensor, new: Tensor
    ) -> CachedStates:
        """Without asking where the cache ends: everything there is room for, and a ring."""
        count, device = new.shape[2], new.device
        steps = start + torch.arange(count, device=device)
        full.index_copy_(2, steps, new_full)
        # One token takes the place of the one that has just left the window; with several, what
        # they replace is still seen by the first of them.
        newest = start if count == 1 else start - 1
        slots = newest - (newest - torch.arange(self.ring, device=device)) % self.ring
        sliding = near
        if count > 1:
            sliding, slots = torch.cat([near, new], dim=2), torch.cat([slots, steps])
        last = min(count, self.ring)
        near.index_copy_(2, self.sinks + steps[-last:] % self.ring, new[:, :, -last:])
        return CachedStates(full, sliding, slots=slots)

    def _add_in_order(
        self, start: Any, full: Tensor, near: Tensor, new_full: Tensor, new: Tensor
    ) -> CachedStates:
        """As a HybridCache does: the tokens seen and no others, in their order."""
        end, device = start + new.shape[2], new.device
        if end > self.max_cache_len:
            raise ValueError(
                f"the static cache has room for {self.max_cache_len} tokens and would get {end}: "
                "make a larger one"
            )
        full[:, :, start:end] = new_full
        past = min(start, self.layout.window.past)
        sliding, sinks = new, None
        if past:
            places = self.sinks + torch.arange(start - past, start, device=device) % self.ring
            sliding = torch.cat([near.index_select(2, places), new], dim=2)
        if self.sinks and start > past:
            sinks = near[:, :, : self.sinks]
        first = max(start, end - self.ring)
        places = self.sinks + torch.arange(first, end, device=device) % self.ring
        near.index_copy_(2, places, new[:, :, first - end :])
        return CachedStates(full[:, :, :end], sliding, sinks)

    def _keep_sinks(self, news: Sequence[Tensor], context: AttentionContext) -> None:
        """Store the sinks among the pass's tokens; only `context` knows where padding ends."""
        if context.start is None and context.valid is None and context.q_offset >= self.sinks:
            return
        for name, new in zip(self.tensor_names[2:], news, strict=True):
            sinks = getattr(self, name)[:, :, : self.sinks]
            sinks.copy_(gather_sinks(new, sinks, context, self.sinks))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Tokens seen, a tensor [] on the cache's device."""
        return self.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens.

        Raises ValueError for a positive number, and RuntimeError once the ring has gone round and
        some tokens would stay: it has lost those that sliding heads would see again.
        """
        if tokens_to_remove > 0:
            raise ValueError("crop takes the negative number of tokens to remove")
        length = int(self.length)
        some_stay = 0 < -tokens_to_remove < length
        if self.layout.sliding and some_stay and length > self.ring:
            raise RuntimeError(
                f"tokens cannot be taken back: of {length} the static cache's sliding heads hold "
                f"the last {self.ring}; use the dynamic cache"
            )
        self.length.sub_(min(-tokens_to_remove, length))

    def reset(self) -> None:
        self.length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for name in self.tensor_names if self.is_initialized else ():
            states = getattr(self, name)
            states.copy_(states.index_select(0, beam_idx.to(states.device)))


class StaticHybridCache(Cache):
    """Cache of a hybrid model with room for `max_cache_len` tokens and no more, allocated once.

    A full KV head has `max_cache_len` entries, a sliding one W + S, or as many where that is more.
    Decoding token by token compiles without a graph break and never again.
    """

    def __init__(
        self,
        layouts: Sequence[HeadLayout | None],
        max_cache_len: int,
        states: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(
            layers=[
                cache_layer(
                    StaticHybridCacheLayer, (states or {}).get(number, 0), layout, max_cache_len
                )
                for number, layout in enumerate(layouts)
            ]
        )

    @classmethod
    def of(cls, model: Any, max_cache_len: int) -> StaticHybridCache:
        """An empty cache for a model in search or deploy mode."""
        return cls(layouts_of(model), max_cache_len, decoder_layers(model.config).states)

    @property
    def max_cache_len(self) -> int:
        """Tokens there is room for, by transformers' name before 5.20."""
        return int(self.get_max_length())

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and other states held by all layers."""
        return held_bytes(self)
