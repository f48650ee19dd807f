"""Key/value cache whose sliding heads keep the last W - 1 tokens and the sinks, and no more.

Shapes: B batch, T tokens of a pass, HKV key/value heads, D head dimension, S sinks, W
window. The two kinds of heads have separate tensors, so that what a sliding head no longer sees is
really freed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from bosch.attention.context import AttentionContext
from bosch.attention.layout import CachedStates, HeadLayout, gather_sinks
from bosch.model.families import decoder_layers
from bosch.model.interface import layouts_of


class SplitCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Cache of one layer in several tensors, each with the batch as its first dimension."""

    is_compileable = False

    is_sliding = False
    device: torch.device
    tensor_names: tuple[str, ...] = ()

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = layout

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.tensor_names:
            states = getattr(self, name)
            if states is not None:
                setattr(self, name, change(states))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda states: states[indices])

    def offload(self) -> None:
        self._map(lambda states: states.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda states: states.to(self.device, non_blocking=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages held, counted once."""
        return _storage_bytes(getattr(self, name) for name in self.tensor_names)


def _storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, counted once."""
    held = [tensor for tensor in tensors if tensor is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


class HybridCacheLayer(SplitCacheLayer):  # type: ignore[no-untyped-call]
    """Cache of one layer. Attention calls `settle` after each pass, which evicts."""

    is_croppable = True
    is_compileable = False
    supports_early_init = False
    tensor_names = (
        "full_keys",
        "full_values",
        "recent_keys",
        "recent_values",
        "sink_keys",
        "sink_values",
    )

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__(layout)
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.sink_slots: Tensor | None = None
        self.full_keys: Tensor | None = None
        self.full_values: Tensor | None = None
        self.recent_keys: Tensor | None = None
        self.recent_values: Tensor | None = None
        self.sink_keys: Tensor | None = None
        self.sink_values: Tensor | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        for kind, heads in (("full", self.layout.full), ("recent", self.layout.sliding)):
            for name, states in (("keys", key_states), ("values", value_states)):
                shape = (states.shape[0], len(heads), 0, states.shape[3])
                setattr(self, f"{kind}_{name}", states.new_empty(shape))
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all that its queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        self.full_keys = self._joined(self.full_keys, key_states, "full")
        self.full_values = self._joined(self.full_values, value_states, "full")
        self.recent_keys = self._joined(self.recent_keys, key_states, "sliding")
        self.recent_values = self._joined(self.recent_values, value_states, "sliding")
        keys = CachedStates(self.full_keys, self.recent_keys, self.sink_keys, done=self.settle)
        return keys, CachedStates(self.full_values, self.recent_values, self.sink_values)

    def _joined(self, past: Tensor | None, new: Tensor, kind: str) -> Tensor:
        assert past is not None
        heads = self.layout.heads_of(new, kind)
        return torch.cat([past, heads], dim=2) if past.shape[2] else heads

    def settle(self, context: AttentionContext) -> None:
        """Forget what no later query of a sliding head sees; `context` is the pass just done."""
        if self.layout.window.sinks and self.layout.sliding:
            self._keep_sinks(context)
        if not self.record_past:
            self._evict()

    def _keep_sinks(self, context: AttentionContext) -> None:
        if self.length <= self.layout.window.past:
            return
        assert self.recent_keys is not None and self.recent_values is not None
        first = self.length - self.recent_keys.shape[2]
        if (
            self.sink_keys is not None
            and context.valid is None
            and first >= self.layout.window.sinks
        ):
            return
        count = self.layout.window.sinks
        self.sink_keys = gather_sinks(self.recent_keys, self.sink_keys, context, count)
        self.sink_values = gather_sinks(self.recent_values, self.sink_values, context, count)

    def _evict(self) -> None:
        """Copies what is kept, so that the rest is freed: a slice would keep all of it alive."""
        keep = self.layout.window.past
        for name in ("recent_keys", "recent_values"):
            states = getattr(self, name)
            if states.shape[2] > keep:
                states = states[:, :, states.shape[2] - keep :]
            setattr(self, name, _owned(states))
        self.full_keys, self.full_values = _owned(self.full_keys), _owned(self.full_values)

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
        """Take back the last `-tokens_to_remove` tokens (0 only evicts).

        Raises ValueError for a positive number, and RuntimeError when sliding heads have forgotten
        tokens they would need again (`activate_past_recording` before the pass keeps them).
        """
        if tokens_to_remove > 0:
            raise ValueError("crop takes the negative number of tokens to remove")
        remove = -tokens_to_remove
        if not self.is_initialized:
            return
        assert self.recent_keys is not None
        left = max(0, self.length - remove)
        recent = max(0, self.recent_keys.shape[2] - remove)
        if self.layout.sliding and remove and recent < min(left, self.layout.window.past):
            raise RuntimeError(
                "the cache of a sliding head no longer holds the tokens before the cut: call "
                "activate_past_recording() before the tokens to be removed are added"
            )
        for name in ("full_keys", "full_values", "recent_keys", "recent_values"):
            states = getattr(self, name)
            setattr(self, name, states[:, :, : max(0, states.shape[2] - remove)])
        self.length = left
        if left <= self.layout.window.past:  # the sinks stand among the recent tokens again
            self.sink_keys = self.sink_values = None
        self._evict()

    def padded_rows(self, padding: Tensor, length: int) -> HybridCacheLayer:
        """Rows that begin with `padding` [B] empty slots and hold this one sequence from there on.

        Each ends at slot `length`. All tokens of the sequence must be here (past recording).
        """
        rows = HybridCacheLayer(self.layout)
        rows.lazy_initialization(self.full_keys, self.full_values)  # type: ignore[arg-type]
        rows.length = length
        for name in self.tensor_names[:4]:
            setattr(rows, name, _padded_rows(getattr(self, name), padding, length))
        if self.layout.window.sinks and length > self.layout.window.past:
            for kind in ("keys", "values"):
                sinks = getattr(self, f"recent_{kind}")[:, :, : self.layout.window.sinks]
                setattr(rows, f"sink_{kind}", sinks.expand(len(padding), -1, -1, -1))
        rows._evict()
        return rows

    def reset(self) -> None:
        self._clear()


def _padded_rows(states: Tensor, padding: Tensor, length: int) -> Tensor:
    """[B, H, length, D] of states [1, H, T, D]: row i begins `padding[i]` slots late."""
    slots = torch.arange(length, device=states.device) - padding[:, None]  # [B, length]
    return states[0][:, slots.clamp_min(0)].transpose(0, 1).contiguous()


def _owned(states: Tensor | None) -> Tensor:
    """`states` itself, or a copy where it keeps a larger tensor alive."""
    assert states is not None
    size = states.numel() * states.element_size()
    if states.untyped_storage().nbytes() == size:
        return states
    return states.clone(memory_format=torch.contiguous_format)


@functools.cache
def with_states(kind: type[SplitCacheLayer]) -> Any:
    """A kind of cache layer that holds states of fixed size beside those of its attention."""

    def __init__(self: Any, states: int, *args: Any) -> None:
        kind.__init__(self, *args)
        LinearAttentionLayer.__init__(self, states)

    def lazy_initialization(self: Any, *args: Any, **kwargs: Any) -> None:
        # Keys and values come by position, states by name.
        owner: Any = kind if args else LinearAttentionLayer
        owner.lazy_initialization(self, *args, **kwargs)

    def of_both(name: str) -> Callable[..., None]:
        def call(self: Any, *args: Any) -> None:
            for owner in (LinearAttentionLayer, kind):
                getattr(owner, name)(self, *args)

        return call

    both = ("reset", "reorder_cache", "crop", "offload", "prefetch", "activate_past_recording")
    body = {
        "__init__": __init__,
        "lazy_initialization": lazy_initialization,
        "get_max_length": kind.get_max_length,
        "is_compileable": kind.is_compileable,
        **{name: of_both(name) for name in both},
    }
    return type(f"{kind.__name__}WithStates", (LinearAttentionLayer, kind), body)


def cache_layer(
    kind: type[SplitCacheLayer], states: int, layout: HeadLayout | None, *args: Any
) -> Any:
    """Cache of a layer with or without attention, and with so many states of fixed size."""
    if layout is None:
        # transformers has had layers without anything since 5.23; vLLM's builds pin an older one.
        empty: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
        return (LinearAttentionLayer if states else empty)(number_of_states=states)
    return with_states(kind)(states, layout, *args) if states else kind(layout, *args)


class HybridCache(Cache):
    """Cache of a hybrid model, one `HybridCacheLayer` for each layer with attention.

    A sliding KV head holds at most W - 1 + S entries after a pass, a full one all. Works with
    batches, left padding, beam search and chunked prefill; `crop` where past recording is active.
    `states` are the numbers of states of fixed size by layer; layout None is no attention.
    """

    def __init__(
        self, layouts: Sequence[HeadLayout | None], states: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(
            layers=[
                cache_layer(HybridCacheLayer, (states or {}).get(number, 0), layout)
                for number, layout in enumerate(layouts)
            ]
        )

    @classmethod
    def of(cls, model: Any) -> HybridCache:
        """An empty cache for a model in search or deploy mode."""
        return cls(layouts_of(model), decoder_layers(model.config).states)

    @property
    def hybrid_layers(self) -> list[HybridCacheLayer]:
        """Those with attention, as what they are."""
        return [layer for layer in self.layers if isinstance(layer, HybridCacheLayer)]

    def activate_past_recording(self) -> None:
        """Keep all tokens of a pass until `crop`, so that it can take some back."""
        for layer in self.layers:
            if isinstance(layer, HybridCacheLayer | LinearAttentionLayer):
                layer.activate_past_recording()

    @property
    def max_cache_len(self) -> int:
        """No limit, -1: transformers' name before 5.20, which PEFT's prefix tuning still reads."""
        return -1

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return held_bytes(self)


def keeps_every_token(cache: Cache) -> bool:
    """Whether a cache holds keys and values of every token, also after a pass, and nothing else."""
    layers: Iterable[Any] = cache.layers
    return all(
        layer.record_past if type(layer) is HybridCacheLayer else type(layer) is DynamicLayer
        for layer in layers
    )


def padded_rows(cache: Cache, padding: Tensor, length: int) -> Cache:
    """A cache of rows that begin with `padding` [B] empty slots and hold the sequence of `cache`.

    Every row ends at slot `length`, as that of a batch whose prompts begin alike and are padded on
    the left: row i holds the first `length - padding[i]` tokens. `cache` holds one sequence, all of
    whose tokens are there (`keeps_every_token`).
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
    """Bytes of the storages in which a cache keeps keys, values and other states, counted once."""
    return _storage_bytes(tensor for layer in cache.layers for tensor in _tensors(layer))


def _tensors(layer: Any) -> Iterator[Tensor | None]:
    """What one layer of a cache holds, of a hybrid model or of an ordinary one."""
    names = layer.tensor_names if isinstance(layer, SplitCacheLayer) else ("keys", "values")
    for name in names:
        yield getattr(layer, name, None)
    for name in ("conv_states", "recurrent_states"):
        yield from getattr(layer, name, {}).values()


def state_bytes(model: Any) -> int:
    """Bytes of the states of fixed size that a model holds of one sequence."""
    if not decoder_layers(model.config).states:
        return 0
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=token, past_key_values=cache, use_cache=True)
    return _storage_bytes(
        tensor
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for tensor in getattr(layer, name, {}).values()
    )
