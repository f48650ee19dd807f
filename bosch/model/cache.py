"""Key/value cache whose sliding heads keep only the last W - 1 tokens and the sinks.

Shapes: B batch, T tokens of a pass, HKV key/value heads, HG those of a group, R tokens held, D head
dimension, S sinks, W window. Each group has its own tensors: memory behind a window is freed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)
from transformers.generation.utils import ALL_CACHE_NAMES

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedGroup, CachedStates, HeadGroup, HeadLayout, gather_sinks
from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.model.interface import layouts_of
from bosch.window import Window

# transformers' name of the cache: "past_key_values", from transformers 5.24 on "cache".
CACHE_NAME: str = ALL_CACHE_NAMES[0]


@dataclass
class GroupCache:
    """Keys and values [B, HG, R, D] of a group; sinks [B, HG, S, D], None while in `keys`."""

    group: HeadGroup
    keys: Tensor
    values: Tensor
    sink_keys: Tensor | None = None
    sink_values: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        names = ("keys", "values", "sink_keys", "sink_values")
        held = {name: getattr(self, name) for name in names}
        return {name: states for name, states in held.items() if states is not None}

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, states in self.tensors.items():
            setattr(self, name, change(states))


class SplitCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Cache of one layer in several tensors, each with the batch as its first dimension."""

    is_compileable = False
    is_sliding = False
    device: torch.device

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = layout
        self.groups: list[Any] = []  # one for each group of the layout, after the first pass

    def check_heads(self, states: Tensor) -> None:
        """Raise UserError if states [B, HKV, T, D] have another HKV than the layout."""
        heads = self.layout.num_key_value_heads
        if states.shape[1] != heads:
            raise UserError(
                f"the cache is of a layer with {heads} KV heads and would get states of "
                f"{states.shape[1]}: pass a cache of this model, and do not split its heads over "
                "processes"
            )

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (tensor for group in self.groups for tensor in group.tensors.values())

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        for group in self.groups:
            group.change(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda states: states[indices])

    def offload(self) -> None:
        self.change(lambda states: states.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.change(lambda states: states.to(self.device, non_blocking=True))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise as `crop` does, and change nothing."""
        raise NotImplementedError


class HybridCacheLayer(SplitCacheLayer):  # type: ignore[no-untyped-call]
    """Cache of one layer. Attention calls `settle` after each pass, which evicts."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__(layout)
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.groups = []
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        for group in self.layout.groups:
            keys, values = (
                states.new_empty(states.shape[0], len(group.heads), 0, states.shape[3])
                for states in (key_states, value_states)
            )
            self.groups.append(GroupCache(group, keys, values))
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all states that its queries may see."""
        self.check_heads(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        for cached in self.groups:
            cached.keys = self._joined(cached.keys, key_states, cached.group)
            cached.values = self._joined(cached.values, value_states, cached.group)
        keys = [CachedGroup(cached.keys, cached.sink_keys) for cached in self.groups]
        values = [CachedGroup(cached.values, cached.sink_values) for cached in self.groups]
        return CachedStates(keys, done=self.settle), CachedStates(values)

    def _joined(self, past: Tensor, new: Tensor, group: HeadGroup) -> Tensor:
        heads = self.layout.heads_of(new, group)
        return torch.cat([past, heads], dim=2) if past.shape[2] else heads

    def settle(self, context: AttentionContext) -> None:
        """Drop tokens that no later query of a sliding head sees; `context` is the last pass."""
        for cached in self.groups:
            if cached.group.window is not None and cached.group.window.sinks:
                self._keep_sinks(cached, cached.group.window, context)
        if not self.record_past:
            self._evict()

    def _keep_sinks(self, cached: GroupCache, window: Window, context: AttentionContext) -> None:
        if self.length <= window.past:
            return
        count = window.sinks
        first = self.length - cached.keys.shape[2]
        if cached.sink_keys is not None and context.valid is None and first >= count:
            return
        cached.sink_keys = gather_sinks(cached.keys, cached.sink_keys, context, count)
        cached.sink_values = gather_sinks(cached.values, cached.sink_values, context, count)

    def _evict(self) -> None:
        """Copy what is kept, since a slice would keep the whole tensor in memory."""
        for cached in self.groups:
            cached.keys = _last(cached.keys, cached.group.window)
            cached.values = _last(cached.values, cached.group.window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Keep all tokens of a pass until `crop`, so that it can take some back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 only evicts).

        Raises ValueError for a positive number, and RuntimeError when sliding heads have dropped
        tokens that they would need again (`activate_past_recording` before the pass keeps them).
        """
        self.check_crop(tokens_to_remove)
        remove = -tokens_to_remove
        left = max(0, self.length - remove)
        for cached in self.groups:
            held, window = max(0, cached.keys.shape[2] - remove), cached.group.window
            cached.keys, cached.values = cached.keys[:, :, :held], cached.values[:, :, :held]
            if window is not None and left <= window.past:
                # The sinks are among the recent tokens again.
                cached.sink_keys = cached.sink_values = None
        self.length = left
        self._evict()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise as `crop` does, and change nothing."""
        check_removed(tokens_to_remove)
        left = max(0, self.length + tokens_to_remove)
        for cached in self.groups:
            window, held = cached.group.window, max(0, cached.keys.shape[2] + tokens_to_remove)
            if window is not None and held < min(left, window.past):
                raise RuntimeError(
                    "the cache of a sliding head no longer holds the tokens before the cut: call "
                    "activate_past_recording() before the tokens to be removed are added"
                )

    def padded_rows(self, padding: Tensor, length: int) -> HybridCacheLayer:
        """This whole sequence in rows of `length` slots, which begin with `padding` [B] slots."""
        rows = HybridCacheLayer(self.layout)
        rows.dtype, rows.device, rows.is_initialized = self.dtype, self.device, True
        rows.length = length
        for cached in self.groups:
            keys, values = (_padded_rows(s, padding, length) for s in (cached.keys, cached.values))
            row = GroupCache(cached.group, keys, values)
            window = cached.group.window
            if window is not None and window.sinks and length > window.past:
                # Sinks that a row does not have yet have entries, too, which are replaced later.
                last = cached.keys.shape[2] - 1
                first = torch.arange(window.sinks, device=cached.keys.device).clamp(max=last)
                row.sink_keys, row.sink_values = (
                    states[:, :, first].expand(len(padding), -1, -1, -1)
                    for states in (cached.keys, cached.values)
                )
            rows.groups.append(row)
        rows._evict()
        return rows

    def reset(self) -> None:
        self._clear()


def check_removed(tokens_to_remove: int) -> None:
    """Raise ValueError for a number of tokens that `crop` does not accept."""
    if tokens_to_remove > 0:
        raise ValueError("crop takes the negative number of tokens to remove")


def _padded_rows(states: Tensor, padding: Tensor, length: int) -> Tensor:
    """States [1, H, T, D] as rows [B, H, length, D]; row i begins with `padding[i]` slots."""
    slots = torch.arange(length, device=states.device) - padding[:, None]  # [B, length]
    return states[0][:, slots.clamp_min(0)].transpose(0, 1).contiguous()


def _last(states: Tensor, window: Window | None) -> Tensor:
    """The part of `states` that later queries see; a copy if a view would keep more in memory."""
    if window is not None and states.shape[2] > window.past:
        states = states[:, :, states.shape[2] - window.past :]
    if states.untyped_storage().nbytes() == states.numel() * states.element_size():
        return states
    return states.clone(memory_format=torch.contiguous_format)


@functools.cache
def _with_states(kind: type[SplitCacheLayer]) -> Any:
    """A cache layer class with states of fixed size in addition to those of its attention."""

    def __init__(self: Any, states: int, *args: Any) -> None:
        kind.__init__(self, *args)
        LinearAttentionLayer.__init__(self, states)

    def lazy_initialization(self: Any, *args: Any, **kwargs: Any) -> None:
        # Keys and values are positional arguments, states are keyword arguments.
        owner: Any = kind if args else LinearAttentionLayer
        owner.lazy_initialization(self, *args, **kwargs)

    def call_both(name: str) -> Callable[..., None]:
        def call(self: Any, *args: Any) -> None:
            for owner in (LinearAttentionLayer, kind):
                getattr(owner, name)(self, *args)

        return call

    names = ("reset", "reorder_cache", "crop", "offload", "prefetch", "activate_past_recording")
    body = {
        "__init__": __init__,
        "lazy_initialization": lazy_initialization,
        "get_max_length": kind.get_max_length,
        "is_compileable": kind.is_compileable,
        **{name: call_both(name) for name in names if hasattr(kind, name)},
    }
    return type(f"{kind.__name__}WithStates", (LinearAttentionLayer, kind), body)


def _cache_layer(
    kind: type[SplitCacheLayer], states: int, layout: HeadLayout | None, *args: Any
) -> Any:
    """Cache of a layer with or without attention, and with `states` of fixed size."""
    if layout is None:
        # transformers has empty layers since 5.23; vLLM's builds pin an older version.
        empty: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
        return (LinearAttentionLayer if states else empty)(number_of_states=states)
    return _with_states(kind)(states, layout, *args) if states else kind(layout, *args)


class SplitCache(Cache):
    """Cache of a model; `layouts` has None without attention, `states` counts those by layer."""

    def __init__(
        self,
        kind: type[SplitCacheLayer],
        layouts: Sequence[HeadLayout | None],
        states: Mapping[int, int] | None,
        *args: Any,
    ) -> None:
        state_counts = states or {}
        super().__init__(
            layers=[
                _cache_layer(kind, state_counts.get(number, 0), layout, *args)
                for number, layout in enumerate(layouts)
            ]
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens in all layers, or in none if one raises.

        Raises as the layers do, and RuntimeError for recurrent states, unless all tokens go.
        """
        check_removed(tokens_to_remove)
        layers: Iterable[Any] = self.layers
        if 0 < self.get_seq_length() <= -tokens_to_remove:
            for layer in layers:
                layer.reset()
            return
        for layer in layers:
            if isinstance(layer, SplitCacheLayer):
                layer.check_crop(tokens_to_remove)
            if not isinstance(layer, LinearAttentionLayer):
                continue
            if not layer.record_past:
                layer.crop(tokens_to_remove)  # raises, and changes nothing
            if tokens_to_remove and any(layer.is_recurrent_states_initialized.values()):
                raise RuntimeError(
                    "tokens cannot be taken back from recurrent states: pass the text again with "
                    "a new cache"
                )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, consecutively."""
        self._change_rows(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._change_rows(lambda states: states[indices])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to all states of the layers; transformers does so for attention only."""
        for layer in self.layers:
            if isinstance(layer, SplitCacheLayer):
                layer.change(change)
            for name in ("conv_states", "recurrent_states"):
                by_number = getattr(layer, name, {})
                by_number |= {n: change(x) for n, x in by_number.items() if x is not None}


class HybridCache(SplitCache):
    """Cache of a hybrid model, one `HybridCacheLayer` for each layer with attention.

    A sliding KV head holds at most W - 1 + S entries after a pass, a full head all. Works with
    batches, left padding, beam search and chunked prefill, and with `crop` under past recording.
    """

    def __init__(
        self, layouts: Sequence[HeadLayout | None], states: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(HybridCacheLayer, layouts, states)

    @classmethod
    def of(cls, model: Any) -> HybridCache:
        """Make an empty cache for a model in search or deploy mode."""
        return cls(layouts_of(model), decoder_layers(model.config).states)

    @property
    def hybrid_layers(self) -> list[HybridCacheLayer]:
        """The layers with attention."""
        return [layer for layer in self.layers if isinstance(layer, HybridCacheLayer)]

    def activate_past_recording(self) -> None:
        """Keep all tokens of a pass until `crop`, so that it can take some back."""
        for layer in self.layers:
            if isinstance(layer, HybridCacheLayer | LinearAttentionLayer):
                layer.activate_past_recording()

    @property
    def max_cache_len(self) -> int:
        """-1, no limit; transformers' name before 5.20, which PEFT's prefix tuning still reads."""
        return -1


def keeps_every_token(cache: Cache) -> bool:
    """Whether a cache always holds keys and values of all tokens, and nothing else."""
    layers: Iterable[Any] = cache.layers
    return all(
        layer.record_past if type(layer) is HybridCacheLayer else type(layer) is DynamicLayer
        for layer in layers
    )


def padded_rows(cache: Cache, padding: Tensor, length: int) -> Cache:
    """A cache of rows with `padding` [B] slots before the one sequence of `cache`.

    Row i has the first `length - padding[i]` tokens. `cache` has all (`keeps_every_token`).
    """
    rows: list[Any] = []
    layers: Iterable[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, HybridCacheLayer):
            rows.append(layer.padded_rows(padding, length))
        else:
            row = DynamicLayer()  # type: ignore[no-untyped-call]
            row.lazy_initialization(layer.keys, layer.values)
            row.keys = _padded_rows(layer.keys, padding, length)
            row.values = _padded_rows(layer.values, padding, length)
            rows.append(row)
    return Cache(layers=rows)


def held_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache's keys, values and other states, each counted once."""
    return _storage_bytes(tensor for layer in cache.layers for tensor in _tensors(layer))


def used_bytes(cache: Cache) -> int:
    """Bytes of the keys, values and other states that later passes read.

    transformers' sliding layers hold slices of a prompt, and free the rest with the next token.
    """
    tensors = (tensor for layer in cache.layers for tensor in _tensors(layer))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _tensors(layer: Any) -> Iterator[Tensor | None]:
    """The states in one layer of a cache, of a hybrid or an ordinary model."""
    if isinstance(layer, SplitCacheLayer):
        yield from layer.tensors
    else:
        yield from (getattr(layer, "keys", None), getattr(layer, "values", None))
    yield from _states(layer)


def _states(layer: Any) -> Iterator[Tensor | None]:
    """The states of fixed size in one layer of a cache."""
    for name in ("conv_states", "recurrent_states"):
        yield from getattr(layer, name, {}).values()


def _storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, counted once."""
    held = [tensor for tensor in tensors if tensor is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def state_bytes(model: Any) -> int:
    """Bytes of a model's states of fixed size for one sequence."""
    if not decoder_layers(model.config).states:
        return 0
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    return _storage_bytes(state for layer in cache.layers for state in _states(layer))
