"""Bytes of a KV cache by formula, exactly what the caches hold. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bosch.model.families import DecoderLayers
from bosch.window import Window


@dataclass(frozen=True)
class OwnWindow:
    """KV heads of the layers that slide in the base model too, all with one window in tokens."""

    heads: int
    window: int
    bytes_per_head: int

    def bytes(self, tokens: int) -> int:
        """What they hold after `tokens` tokens of one sequence: the last W - 1."""
        return self.bytes_per_head * self.heads * min(tokens, Window(self.window).past)


@dataclass(frozen=True)
class CacheSize:
    """KV cache of a hybrid model under one window, in bytes.

    `full_heads` and `sliding_heads` count the KV heads of all layers with full attention in the
    base model; `bytes_per_head` is what one such head holds of one token, keys and values together.
    The original model and the hybrid alike hold the `own` windows of layers that slide by
    themselves, and `state_bytes` of layers whose state has a fixed size.
    """

    full_heads: int
    sliding_heads: int
    window: Window
    bytes_per_head: int
    own: tuple[OwnWindow, ...] = ()
    state_bytes: int = 0

    @classmethod
    def of(
        cls,
        full_kv_heads_per_layer: Sequence[int],
        layers: DecoderLayers,
        window: Window,
        itemsize: int,
        state_bytes: int = 0,
    ) -> CacheSize:
        """From the full heads of each layer with full attention and the bytes of one number."""
        full = sum(full_kv_heads_per_layer)
        sliding = layers.heads * len(full_kv_heads_per_layer) - full
        own = tuple(
            OwnWindow(layers.own_heads * count, size, 2 * layers.own_head_dim * itemsize)
            for size, count in sorted(Counter(layers.windows.values()).items())
        )
        return cls(full, sliding, window, 2 * layers.head_dim * itemsize, own, state_bytes)

    @property
    def original_per_token(self) -> int:
        """Growth per token of the original model's cache."""
        return self.bytes_per_head * (self.full_heads + self.sliding_heads)

    @property
    def per_token(self) -> int:
        """Growth per token once the windows are full."""
        return self.bytes_per_head * self.full_heads

    @property
    def windows(self) -> int:
        """Most bytes that the sliding heads hold, at any context length."""
        return self.bytes_per_head * self.sliding_heads * (self.window.past + self.window.sinks)

    def original(self, tokens: int) -> int:
        """Bytes of the original model's cache after `tokens` tokens of one sequence."""
        return self.original_per_token * tokens + self._others(tokens)

    def dynamic(self, tokens: int) -> int:
        """Bytes of a HybridCache after `tokens` tokens of one sequence.

        A sliding head holds every token until it has seen more than W - 1, then the last W - 1
        and its S sinks, even where they are still among those.
        """
        if tokens <= self.window.past:
            return self.original(tokens)
        return self.per_token * tokens + self.windows + self._others(tokens)

    def static(self, room: int) -> int:
        """Bytes of a StaticHybridCache with room for `room` tokens of one sequence."""
        sliding = self.bytes_per_head * self.sliding_heads * min(self.window.most_keys, room)
        own = sum(o.bytes_per_head * o.heads * min(o.window, room) for o in self.own)
        return self.per_token * room + sliding + own + self.state_bytes

    def paged(self, tokens: int, page_size: int) -> int:
        """Bytes of the pages of a request of `tokens` tokens in transformers' continuous batching.

        A head that slides has a ring of W tokens; every head has whole pages.
        """

        def pages(most: int) -> int:
            return -(-min(tokens, most) // page_size) * page_size

        sliding = self.bytes_per_head * self.sliding_heads * pages(self.window.size)
        own = sum(one.bytes_per_head * one.heads * pages(one.window) for one in self.own)
        return self.per_token * pages(tokens) + sliding + own

    def _others(self, tokens: int) -> int:
        """Bytes of the layers without full attention."""
        return sum(own.bytes(tokens) for own in self.own) + self.state_bytes
