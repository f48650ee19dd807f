"""Activations cached for later passes: layer inputs, and attention outputs for every choice.

The input of layer l depends only on the mask's rows below l. So it is cached under these rows, and
a later mask that agrees below l starts at layer l. The same entry holds the attention outputs of
layer l with every head full and in each window, from which any row takes its heads'.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bosch.heads import HeadMask

Key = tuple[int, bytes, int]


@dataclass
class LayerActivations:
    """Cached tensors of one layer for one batch, under the mask's rows below that layer.

    `state` [E, T, C] is the layer's input, `outputs` [E, T, HQ, D] the attention outputs before the
    output projection, of all heads for each choice of `HeadMask.choices`. Those of the last layer
    may cover only the positions that predict answers. `starts` counts the passes that began at this
    layer.
    """

    state: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()
    starts: int = 0
    last_used: int = 0

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        state = 0 if self.state is None else self.state.nbytes
        return state + sum(tensor.nbytes for tensor in self.outputs)


class ActivationCache:
    """At most `max_bytes` of tensors; evicts the least recently used ones."""

    def __init__(self, num_layers: int, max_bytes: int) -> None:
        self.num_layers, self.max_bytes = num_layers, max_bytes
        self.enabled = max_bytes > 0
        self.bytes = self.peak_bytes = 0
        self.entries: OrderedDict[Key, LayerActivations] = OrderedDict()
        self._pass = 0
        self._pinned: tuple[int, bytes] | None = None

    def begin(self, mask: HeadMask, shared_layers: int) -> None:
        """Start a pass; the next masks will agree with this one below `shared_layers`."""
        self._pass += 1
        self._pinned = (shared_layers, _rows(mask, shared_layers))

    def is_pinned(self, layer: int) -> bool:
        """Whether later passes are expected to start at `layer`."""
        return self._pinned is not None and self._pinned[0] == layer

    def deepest(self, mask: HeadMask, batch: int) -> int:
        """Highest layer whose input is cached for `mask`; 0 if none is."""
        if self.enabled:
            for layer in reversed(range(1, self.num_layers)):
                entry = self.entries.get((layer, _rows(mask, layer), batch))
                if entry is not None and entry.state is not None:
                    return layer
        return 0

    def get(self, mask: HeadMask, layer: int, batch: int) -> LayerActivations | None:
        """The activations of `layer` for `mask`; marks them as used."""
        key = (layer, _rows(mask, layer), batch)
        entry = self.entries.get(key)
        if entry is not None:
            entry.last_used = self._pass
            self.entries.move_to_end(key)
        return entry

    def add(
        self,
        mask: HeadMask,
        layer: int,
        batch: int,
        state: Tensor | None = None,
        outputs: Sequence[Tensor] = (),
    ) -> None:
        """Add a layer's `state` or `outputs`, if the memory allows it."""
        key = (layer, _rows(mask, layer), batch)
        entry = self.entries.get(key) or LayerActivations()
        new = LayerActivations(
            None if entry.state is not None else state, () if entry.outputs else tuple(outputs)
        )
        size = new.nbytes
        victims = self._victims(size, key) if size else None
        if victims is None:
            return
        for victim in victims:
            self.bytes -= self.entries.pop(victim).nbytes
        entry.state = entry.state if new.state is None else new.state
        entry.outputs = entry.outputs or new.outputs
        entry.last_used = self._pass
        self.entries[key] = entry
        self.entries.move_to_end(key)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def disable(self) -> None:
        """Cache and reuse nothing from now on."""
        self.enabled = False
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.bytes = 0
        self.entries.clear()

    def has_room(self, mask: HeadMask, layer: int, batch: int, size: int) -> bool:
        """Whether an entry of `size` bytes for a layer would be stored."""
        return self._victims(size, (layer, _rows(mask, layer), batch)) is not None

    def _victims(self, size: int, key: Key) -> list[Key] | None:
        """The least recently used entries to evict for `size` bytes; None if that is not enough.

        Entries of this pass and the last one stay, unless the new entry is pinned. Otherwise passes
        that need more than the memory would evict each entry just before it is needed again.
        """
        victims: list[Key] = []
        excess, pinned = self.bytes + size - self.max_bytes, key[:2] == self._pinned
        for victim, entry in self.entries.items():
            if excess <= 0:
                break
            if victim == key or victim[:2] == self._pinned:
                continue
            if not pinned and entry.last_used >= self._pass - 1:
                return None
            victims.append(victim)
            excess -= entry.nbytes
        return victims if excess <= 0 else None


def _rows(mask: HeadMask, layers: int) -> bytes:
    return mask.choices[:layers].tobytes()
