"""Bytes of a KV cache, computed by formula; the caches hold as many. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bosch.model.families import DecoderLayers
from bosch.window import Window


@dataclass(frozen=True)
class OwnWindow:
    """KV heads of the layers that slide in the base model with this window, in tokens."""

    heads: int
    window: int
    bytes_per_head: int

    def bytes(self, tokens: int) -> int:
        """Bytes after `tokens` tokens of one sequence, of which the last W - 1 are held."""
        return self.bytes_per_head * self.heads * min(tokens, Window(self.window).past)


@dataclass(frozen=True)
class CacheSize:
    """KV cache of a hybrid model, in bytes.

    `heads` counts the KV heads of all layers with full attention in the base model, by window
    (None: full). `bytes_per_head` are the key and value of one token in one such head.
    `own_windows` are those of layers that slide in the base model, and `state_bytes` the states of
    fixed size; original and hybrid both hold them.
    """

    heads: Mapping[Window | None, int]
    bytes_per_head: int
    own_windows: tuple[OwnWindow, ...] = ()
    state_bytes: int = 0

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[Window | None, int]],
        layers: DecoderLayers,
        itemsize: int,
        state_bytes: int,
    ) -> CacheSize:
        """The size for each layer's heads by window (`rows`); with `state_bytes` 0 of KV only."""
        heads: Counter[Window | None] = Counter()
        for row in rows:
            heads.update(row)
        own_windows = tuple(
            OwnWindow(layers.own_heads * count, size, 2 * layers.own_head_dim * itemsize)
            for size, count in sorted(Counter(layers.windows.values()).items())
        )
        return cls(heads, 2 * layers.head_dim * itemsize, own_windows, state_bytes)

    @property
    def original_per_token(self) -> int:
        """Growth per token of the original model's cache."""
        return self.bytes_per_head * sum(self.heads.values())

    @property
    def sliding_bytes(self) -> int:
        """Most bytes of the sliding heads in a HybridCache, at any context length."""
        windows = ((window, count) for window, count in self.heads.items() if window is not None)
        return self.bytes_per_head * sum(n * (window.past + window.sinks) for window, n in windows)

    def original(self, tokens: int) -> int:
        """Bytes of the original model's cache after `tokens` tokens of one sequence."""
        return self.original_per_token * tokens + self._others(tokens)

    def dynamic(self, tokens: int) -> int:
        """Bytes of a HybridCache after `tokens` tokens of one sequence."""
        slots = (
            n * (window.held(tokens) if window else tokens) for window, n in self.heads.items()
        )
        return self.bytes_per_head * sum(slots) + self._others(tokens)

    def static(self, room: int) -> int:
        """Bytes of a HybridCache with fixed room for `room` tokens of one sequence."""
        slots = (
            n * (min(window.max_keys, room) if window else room) for window, n in self.heads.items()
        )
        own_bytes = sum(w.bytes_per_head * w.heads * min(w.window, room) for w in self.own_windows)
        return self.bytes_per_head * sum(slots) + own_bytes + self.state_bytes

    def _others(self, tokens: int) -> int:
        """Bytes of the layers without full attention."""
        return sum(window.bytes(tokens) for window in self.own_windows) + self.state_bytes


def states_text(layers: int) -> str:
    """Text after the KV cache's bytes if `layers` layers have states of fixed size."""
    if not layers:
        return ""
    return f" beside the states of {layers} layer{'s' if layers > 1 else ''} of other kinds"
