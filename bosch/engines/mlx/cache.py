"""Caches of a hybrid layer in mlx-lm: an mlx-lm cache for each group of heads.

Shapes: B batch, T tokens, Tk keys, HQ query heads, HKV KV heads, HG KV heads of a group, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from bosch.errors import UserError
from bosch.hybrid import HeadLayout, Window

_Mask: TypeAlias = "mx.array | str | None"
_Attention: TypeAlias = Callable[..., mx.array]


class HybridLayerCache(CacheList):  # type: ignore[misc]
    """A layer's caches, one for each group of its layout: all tokens, or a window and its sinks."""

    @classmethod
    def of(cls, layout: HeadLayout) -> HybridLayerCache:
        """Empty caches for a layer."""
        kind = SinkLayerCache if layout.sinks else HybridLayerCache
        return kind(*(_empty(group.window) for group in layout.groups))

    @property
    def offset(self) -> int | mx.array:
        """Tokens so far; for a batch [B]."""
        return self.caches[0].offset

    def is_trimmable(self) -> bool:
        """Whether no head has a window: it cannot restore keys that refused drafts replaced."""
        return not any(isinstance(cache, RotatingKVCache) for cache in self.caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> HybridLayerCache:
        """A copy with full heads quantised; mlx-lm cannot quantise windows, which are small."""
        options = {"group_size": group_size, "bits": bits}
        caches = (c.to_quantized(**options) if isinstance(c, KVCache) else c for c in self.caches)
        return type(self)(*caches)


class SinkLayerCache(HybridLayerCache):
    """A layer's caches with sink tokens, for one sequence: mlx-lm's batched caches drop sinks."""

    @property
    def merge(self) -> NoReturn:
        # Without this attribute mlx-lm's server answers one request after another.
        raise AttributeError("mlx-lm has no sinks in the caches of a batch")


# mlx-lm restores a saved cache by the name of its class in this module.
for _class in (HybridLayerCache, SinkLayerCache):
    setattr(mlx_cache, _class.__name__, _class)


def _empty(window: Window | None) -> KVCache | RotatingKVCache:
    if window is None:
        return KVCache()
    return RotatingKVCache(window.max_keys, keep=window.sinks)


class LayerPass:
    """A layer's caches during one pass, passed to mlx-lm's attention in place of a cache.

    `caches` is None in a pass without a cache, such as training. `masks` holds the masks of the
    pass by window; the first layer that needs a mask makes it. `update_and_fetch` returns keys and
    values by group, which `grouped_attention` understands.
    """

    def __init__(
        self, caches: CacheList | None, layout: HeadLayout, masks: dict[Window | None, _Mask]
    ) -> None:
        self._caches, self._layout, self._masks = caches, layout, masks

    @property
    def offset(self) -> int | mx.array:
        """Position of the first token of the pass; for a batch [B]."""
        return 0 if self._caches is None else self._caches.caches[0].offset

    def make_mask(self, *args: object, **kwargs: object) -> None:
        """None, since no single mask fits all heads; each group has its own in `_mask`."""

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Append keys and values [B, HKV, T, D]; returns each group's so far, [B, HG, Tk, D]."""
        self._parts = []
        # New caches each time: with gradient checkpointing a layer is computed twice.
        caches = HybridLayerCache.of(self._layout) if self._caches is None else self._caches
        for cache, group in zip(caches.caches, self._layout.groups, strict=True):
            first, last = group.heads[0], group.heads[-1]
            mask = self._mask(cache, group.window, keys.shape[2])
            states = cache.update_and_fetch(keys[:, first : last + 1], values[:, first : last + 1])
            self._parts.append((cache, group, mask, *states))
        return [part[3] for part in self._parts], [part[4] for part in self._parts]

    def _mask(self, cache: KVCache, window: Window | None, tokens: int) -> _Mask:
        """Mask for mlx-lm's attention: an array [.., T, Tk], "causal", or None for no mask."""
        if window not in self._masks:
            if window is not None and window.sinks:
                mask = _mask_with_sinks(cache, tokens)
            else:
                mask = cache.make_mask(tokens, return_array=False, window_size=None)
            self._masks[window] = mask
        return self._masks[window]

    def attend(
        self, attention: _Attention, queries: mx.array, logits: mx.array | None, **options: Any
    ) -> mx.array:
        """mlx-lm's attention of `queries`, both [B, HQ, T, D], with any extra `logits` [HQ]."""
        q_per_kv = queries.shape[1] // self._layout.num_key_value_heads
        outputs = []
        for cache, group, mask, keys, values in self._parts:
            heads = slice(group.heads[0] * q_per_kv, (group.heads[-1] + 1) * q_per_kv)
            extra = {} if logits is None else {"sinks": logits[heads]}  # mlx-lm's name for them
            extra |= {"cache": cache, "mask": mask, **options}
            outputs.append(attention(queries[:, heads], keys, values, **extra))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _mask_with_sinks(cache: RotatingKVCache, tokens: int) -> mx.array | None:
    """Visible keys [T, Tk], window and sinks, which mlx-lm's mask hides; None for one token."""
    if tokens == 1:
        return None
    end = cache.offset + tokens
    # mlx-lm cuts the cache to max_size - 1 slots before it appends a pass.
    slots = mx.arange(min(cache.size(), cache.max_size - 1) + tokens)
    keys = mx.where(slots < cache.keep, slots, slots + end - slots.size)
    queries = mx.arange(cache.offset, end)[:, None]
    window = cache.max_size - cache.keep
    return (keys <= queries) & ((keys > queries - window) | (keys < cache.keep))


def grouped_attention(attention: _Attention) -> _Attention:
    """mlx-lm's `scaled_dot_product_attention`, extended to caches of type `LayerPass`."""

    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, cache: object, **options: Any
    ) -> mx.array:
        if isinstance(cache, LayerPass):
            options.pop("mask", None)
            return cache.attend(attention, queries, options.pop("sinks", None), **options)
        return attention(queries, keys, values, cache=cache, **options)

    return attend


def check_caches(caches: Sequence[object], layouts: Sequence[HeadLayout | None]) -> None:
    """Raise UserError for caches that were made for another model."""
    if len(caches) != len(layouts) or not all(map(_fits, caches, layouts)):
        raise UserError(
            "mlx-lm gave this hybrid model caches of another one; make them with its make_cache()"
        )


def _fits(cache: object, layout: HeadLayout | None) -> bool:
    """Whether a layer's cache has a part for each group of the layout, with the same window."""
    if layout is None:
        return True
    windows = [group.window for group in layout.groups]
    return isinstance(cache, CacheList) and [_window(part) for part in cache.caches] == windows


def _window(cache: object) -> Window | None:
    size, sinks = getattr(cache, "max_size", None), getattr(cache, "keep", 0)
    return None if size is None else Window(size - sinks, sinks)
