"""Key/value cache of a hybrid model: one of transformers' cache layers for each group of heads.

Shapes: B batch, T tokens of a pass, HKV key/value heads, HG those of a group, D head dimension,
S sinks, W window. A cache grows with the text, or has a fixed size: then its tensors are changed in
place and its length is read on the device, so torch.compile traces decoding only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)
from transformers.generation.utils import ALL_CACHE_NAMES

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedGroup, CachedStates, HeadLayout, gather_sinks
from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.model.interface import layouts_of
from bosch.window import Window

# transformers' name of the cache: "past_key_values", from transformers 5.24 on "cache".
CACHE_NAME: str = ALL_CACHE_NAMES[0]
_States: TypeAlias = tuple[Tensor, Tensor]  # keys and values of a group, [B, HG, T, D]


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The last W - 1 tokens, and the sinks once they are not among these."""

    keys: Any
    values: Any

    def __init__(self, window: Window) -> None:
        super().__init__(window.size)
        self.window = window
        self.sinks: Any = DynamicLayer()  # type: ignore[no-untyped-call]

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Keep the sinks, and drop what no later query sees; `context` is the pass of `seen`."""
        count, first = self.window.sinks, self.cumulative_length - seen[0].shape[2]
        stored = self.sinks.keys is not None and context.valid is None and first >= count
        if count and self.cumulative_length > self.window.past and not stored:
            pairs = zip(seen, (self.sinks.keys, self.sinks.values), strict=True)
            sinks = [gather_sinks(states, earlier, context, count) for states, earlier in pairs]
            self.sinks.lazy_initialization(*seen)
            self.sinks.keys, self.sinks.values = sinks
        if not self.record_past:
            self._keep(self.keys.shape[2])

    def _keep(self, count: int) -> None:
        """Of the first `count` tokens keep the last W - 1; a slice would keep all in memory."""
        part = slice(max(0, count - self.window.past), count)
        states = (self.keys[:, :, part], self.values[:, :, part])
        self.keys, self.values = (
            x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in states
        )

    def can_remove(self, count: int) -> bool:
        left = self.cumulative_length - count
        return bool(self.keys.shape[2] - count >= min(left, self.window.past))

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length = max(0, self.cumulative_length + tokens_to_remove)
        self._keep(max(0, self.keys.shape[2] + tokens_to_remove))
        if self.cumulative_length <= self.window.past:
            self.sinks.reset()  # they are among the recent tokens again


class FixedLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """A place for every token; tokens can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)


class FixedWindowLayer(FixedLayer):  # type: ignore[no-untyped-call]
    """The last W tokens, the newest in the last place, and the sinks; or every token if it fits."""

    keys: Any
    values: Any

    def __init__(self, window: Window, room: int) -> None:
        self.room, fits = room, room <= window.max_keys
        super().__init__(room if fits else window.size)
        self.sinks: Any = StaticLayer(0 if fits else window.sinks)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> _States:
        # Any token finds a place here: the table makes one beyond the room fail on the device.
        lengths = torch.arange(1, self.room + 1, device=self.device)
        last = self.cumulative_length + (key_states.shape[2] - 1)
        self.cumulative_length.copy_(lengths.index_select(0, last[None])[0])
        keys = torch.cat([self.keys[:, :, 1:], key_states], dim=2)
        values = torch.cat([self.values[:, :, 1:], value_states], dim=2)
        self.keys.copy_(keys[:, :, -self.max_cache_len :])
        self.values.copy_(values[:, :, -self.max_cache_len :])
        return keys, values

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Keep the sinks among the tokens that attention has read in the pass `context`."""
        for sinks, states in zip((self.sinks.keys, self.sinks.values), seen, strict=True):
            if sinks.shape[2]:
                sinks.copy_(gather_sinks(states, sinks, context, sinks.shape[2]))

    def can_remove(self, count: int) -> bool:
        return bool(self.cumulative_length <= self.max_cache_len)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for states in (self.keys, self.values):
            states.copy_(states.roll(-tokens_to_remove, dims=2))


def _part(window: Window | None, room: int | None) -> Any:
    """Cache layer of one group of heads."""
    if window is None:
        return DynamicLayer() if room is None else FixedLayer(room)  # type: ignore[no-untyped-call]
    return WindowLayer(window) if room is None else FixedWindowLayer(window, room)


def _each(name: str) -> Callable[..., None]:
    """A method that calls `name` of every layer that holds tensors."""

    def call(self: HeadGroupsLayer, *args: Any) -> None:
        for held in self.held:
            getattr(held, name)(*args)

    return call


class HeadGroupsLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Cache of one layer; attention settles the states that `update` returns after reading them."""

    is_sliding = False
    device: torch.device

    def __init__(self, layout: HeadLayout, room: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout, self.max_cache_len = layout, -1 if room is None else room
        self.is_compileable = self.supports_early_init = room is not None
        self.is_croppable = room is None
        self.parts = [_part(group.window, room) for group in layout.groups]
        self.sinks: list[Any] = [getattr(part, "sinks", None) for part in self.parts]
        self.held: list[Any] = [*self.parts, *filter(None, self.sinks)]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        new = self._split(key_states, value_states)
        for part, sinks, states in zip(self.parts, self.sinks, new, strict=True):
            for held in (part, sinks) if self.is_compileable and sinks is not None else (part,):
                held.lazy_initialization(*states)
                held.values = held.values.to(value_states.dtype)  # autocast may leave float32 keys
        self.is_initialized = True

    def _split(self, keys: Tensor, values: Tensor) -> list[_States]:
        heads = self.layout.heads_of
        return [(heads(keys, group), heads(values, group)) for group in self.layout.groups]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all states that its queries may see.

        Raises torch's error for an index out of range if they exceed a fixed size.
        """
        heads = self.layout.num_key_value_heads
        if key_states.shape[1] != heads:
            raise UserError(
                f"the cache is of a layer with {heads} KV heads and would get states of "
                f"{key_states.shape[1]}: pass a cache of this model, and do not split its heads "
                "over processes"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = self._split(key_states, value_states)
        seen = [part.update(*states) for part, states in zip(self.parts, new, strict=True)]
        keys, values = (
            [
                CachedGroup(states[kind], getattr(sinks, name, None))
                for states, sinks in zip(seen, self.sinks, strict=True)
            ]
            for kind, name in enumerate(("keys", "values"))
        )
        return CachedStates(keys, functools.partial(self._settle, seen)), CachedStates(values)

    def _settle(self, seen: list[_States], context: AttentionContext) -> None:
        for part, states in zip(self.parts, seen, strict=True):
            if hasattr(part, "settle"):
                part.settle(states, context)

    def get_seq_length(self) -> Any:
        """Number of tokens so far; with a fixed size a tensor [] on the cache's device."""
        part = self.parts[0]
        return part.cumulative_length if self.is_compileable else part.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_compileable:
            return self.max_cache_len, 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def activate_past_recording(self) -> None:
        """Keep all tokens of a pass until `crop`, so that it can take some back."""
        for part in self.parts:
            if isinstance(part, WindowLayer):
                part.activate_past_recording()  # type: ignore[no-untyped-call]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise as `crop` does, and change nothing."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the negative number of tokens to remove")
        length = int(self.get_seq_length())
        for part in self.parts if 0 < -tokens_to_remove < length else ():
            if hasattr(part, "can_remove") and not part.can_remove(-tokens_to_remove):
                raise RuntimeError(
                    f"tokens cannot be taken back: of {length} the cache's sliding heads hold the "
                    f"last {part.keys.shape[2]}; use the dynamic cache, and call its "
                    "activate_past_recording() before the tokens are added"
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 only drops recorded ones).

        Raises ValueError for a positive number, and RuntimeError when sliding heads have dropped
        tokens that they would need again.
        """
        self.check_crop(tokens_to_remove)
        for part in self.parts if self.is_initialized else ():
            part.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for held in self.held if self.is_initialized else ():
            if not self.is_compileable:
                held.reorder_cache(beam_idx)
                continue
            for states in (held.keys, held.values):  # compiled code knows their addresses
                states.copy_(states.index_select(0, beam_idx.to(states.device)))

    reset = _each("reset")
    offload = _each("offload")
    prefetch = _each("prefetch")
    batch_repeat_interleave = _each("batch_repeat_interleave")
    batch_select_indices = _each("batch_select_indices")


def _both(name: str) -> Callable[..., None]:
    """A method that calls `name` for the keys and values and for the states."""

    def call(self: Any, *args: Any) -> None:
        for kind in (HeadGroupsLayer, LinearAttentionLayer):
            getattr(kind, name)(self, *args)

    return call


class HeadGroupsAndStatesLayer(  # type: ignore[misc, no-untyped-call]
    HeadGroupsLayer, LinearAttentionLayer
):
    """Cache of a layer that also has states of fixed size."""

    is_croppable = False

    def __init__(self, layout: HeadLayout, room: int | None, states: int) -> None:
        LinearAttentionLayer.__init__(self, states)
        HeadGroupsLayer.__init__(self, layout, room)
        self.is_croppable = self.supports_early_init = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Keys and values are positional arguments, states are keyword arguments.
        kind: Any = HeadGroupsLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    reset = _both("reset")
    reorder_cache = _both("reorder_cache")
    crop = _both("crop")
    offload = _both("offload")
    prefetch = _both("prefetch")
    activate_past_recording = _both("activate_past_recording")


def _layer(layout: HeadLayout | None, room: int | None, states: int) -> Any:
    """Cache of a layer with or without attention, and with `states` of fixed size."""
    if layout is not None and states:
        return HeadGroupsAndStatesLayer(layout, room, states)
    if layout is not None:
        return HeadGroupsLayer(layout, room)
    # transformers has empty layers since 5.23; vLLM's builds pin an older version.
    empty: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
    return (LinearAttentionLayer if states else empty)(number_of_states=states)


class HybridCache(Cache):
    """Cache of a hybrid model, one `HeadGroupsLayer` for each layer with attention.

    `layouts` has None for a layer without attention; `states` counts states of fixed size by layer.
    After a pass a sliding KV head holds at most W - 1 + S entries, a full head all; with a fixed
    room of `max_cache_len` tokens W + S, and the room. Works with batches, left padding, beams and
    chunked prefill, and with `crop` under past recording.
    """

    def __init__(
        self,
        layouts: Sequence[HeadLayout | None],
        max_cache_len: int | None = None,
        states: Mapping[int, int] | None = None,
    ) -> None:
        counts = states or {}
        layers = [_layer(x, max_cache_len, counts.get(n, 0)) for n, x in enumerate(layouts)]
        super().__init__(layers)

    @classmethod
    def of(cls, model: Any, max_cache_len: int | None = None) -> HybridCache:
        """Make an empty cache for a model in search or deploy mode."""
        return cls(layouts_of(model), max_cache_len, decoder_layers(model.config).states)

    @property
    def max_cache_len(self) -> int:
        """transformers' name before 5.20, which PEFT's prefix tuning still reads; -1: no limit."""
        return int(self.get_max_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens in all layers, or in none if one raises.

        Raises as the layers do, and RuntimeError for recurrent states, unless all tokens go.
        """
        if 0 < self.get_seq_length() <= -tokens_to_remove:
            self.reset()  # type: ignore[no-untyped-call]
            return
        for layer in self.layers:
            if isinstance(layer, HeadGroupsLayer):
                layer.check_crop(tokens_to_remove)
            if not isinstance(layer, LinearAttentionLayer):
                continue
            if not layer.record_past:
                LinearAttentionLayer.crop(layer, tokens_to_remove)  # raises, and changes nothing
            if tokens_to_remove and any(layer.is_recurrent_states_initialized.values()):
                raise RuntimeError(
                    "tokens cannot be taken back from recurrent states: pass the text again with "
                    "a new cache"
                )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, consecutively."""
        rows = next(x.shape[0] for layer in self.layers for x in _tensors(layer))
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only these rows, in this order; transformers does so in attention's layers only."""
        self.reorder_cache(indices)


def held_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache's keys, values and other states, each counted once."""
    storages = (tensor.untyped_storage() for layer in cache.layers for tensor in _tensors(layer))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def used_bytes(cache: Cache) -> int:
    """Bytes of the keys, values and other states that later passes read.

    transformers' sliding layers hold slices of a prompt, and free the rest with the next token.
    """
    return sum(tensor.nbytes for layer in cache.layers for tensor in _tensors(layer))


def _tensors(layer: Any) -> Iterator[Tensor]:
    """The states in one layer of a cache, of a hybrid or an ordinary model."""
    for held in getattr(layer, "held", [layer]):
        states = (getattr(held, "keys", None), getattr(held, "values", None))
        yield from (x for x in states if x is not None)
    yield from _states(layer)


def _states(layer: Any) -> Iterator[Tensor]:
    """The states of fixed size in one layer of a cache."""
    for name in ("conv_states", "recurrent_states"):
        yield from (x for x in getattr(layer, name, {}).values() if x is not None)


def state_bytes(model: Any) -> int:
    """Bytes of a model's states of fixed size for one sequence."""
    if not decoder_layers(model.config).states:
        return 0
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    return sum(state.nbytes for layer in cache.layers for state in _states(layer))
