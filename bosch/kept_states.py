"""What passes leave behind for later ones: hidden states, and attention of both kinds of heads.

A decoder layer is a function of its input, and its input a function of the mask's rows below. So
the input of layer l is kept under these rows, and a later mask that agrees below l starts there.
In the same place stand the attention outputs of layer l with every head full and with every head
sliding: any row of the mask takes each head's output from one of the two.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from bosch.heads import HeadMask

Key = tuple[int, bytes, int]


@dataclass
class Kept:
    """What is known of one layer for one batch, under the mask's rows below that layer.

    `state` [B, T, C] is the layer's input, `full` and `sliding` [B, T, HQ, D] the attention outputs
    before the output projection. Of the last layer only the answers' positions are kept.
    """

    state: Tensor | None = None
    full: Tensor | None = None
    sliding: Tensor | None = None
    starts: int = 0
    last_used: int = 0

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(t.nbytes for t in (self.state, self.full, self.sliding) if t is not None)


class KeptStates:
    """At most `max_bytes` of kept tensors; the least recently used make room."""

    def __init__(self, num_layers: int, max_bytes: int) -> None:
        self.num_layers, self.max_bytes = num_layers, max_bytes
        self.enabled = max_bytes > 0
        self.bytes = self.peak_bytes = 0
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self._pass = 0
        self._pinned: tuple[int, bytes] | None = None

    def begin(self, mask: HeadMask, shared_layers: int) -> None:
        """A new pass; the masks that follow will agree with this one below `shared_layers`."""
        self._pass += 1
        self._pinned = (shared_layers, _rows(mask, shared_layers))

    def is_pinned(self, layer: int) -> bool:
        """Whether later passes are expected to start at `layer`."""
        return self._pinned is not None and self._pinned[0] == layer

    def deepest(self, mask: HeadMask, batch: int) -> int:
        """Highest layer whose input is known for `mask`; 0 where none is."""
        if self.enabled:
            for layer in reversed(range(1, self.num_layers)):
                found = self._kept.get((layer, _rows(mask, layer), batch))
                if found is not None and found.state is not None:
                    return layer
        return 0

    def at(self, mask: HeadMask, layer: int, batch: int) -> Kept | None:
        """What is known of `layer` for `mask`, marked as used."""
        key = (layer, _rows(mask, layer), batch)
        found = self._kept.get(key) if self.enabled else None
        if found is not None:
            found.last_used = self._pass
            self._kept.move_to_end(key)
        return found

    def keep(
        self,
        mask: HeadMask,
        layer: int,
        batch: int,
        *,
        state: Tensor | None = None,
        full: Tensor | None = None,
        sliding: Tensor | None = None,
    ) -> None:
        """Add what a pass computed, where the memory allows it."""
        if not self.enabled:
            return
        key = (layer, _rows(mask, layer), batch)
        kept = self._kept.get(key) or Kept(last_used=self._pass)
        new = {
            name: tensor
            for name, tensor in (("state", state), ("full", full), ("sliding", sliding))
            if tensor is not None and getattr(kept, name) is None
        }
        size = sum(tensor.nbytes for tensor in new.values())
        if not new or not self._make_room(size, key):
            return
        for name, tensor in new.items():
            setattr(kept, name, tensor)
        kept.last_used = self._pass
        self._kept[key] = kept
        self._kept.move_to_end(key)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def disable(self) -> None:
        """Keep and reuse nothing from now on."""
        self.enabled, self.bytes = False, 0
        self._kept.clear()

    def _make_room(self, size: int, key: Key) -> bool:
        """Drop what was not used for longest; what the last passes used stays unless pinned."""
        if size > self.max_bytes:
            return False
        pinned = key[:2] == self._pinned
        while self.bytes + size > self.max_bytes:
            victim = next((k for k in self._kept if k != key and k[:2] != self._pinned), None)
            if victim is None:
                return False
            if not pinned and self._kept[victim].last_used >= self._pass - 1:
                return False
            self.bytes -= self._kept.pop(victim).nbytes
        return True


def _rows(mask: HeadMask, layers: int) -> bytes:
    return mask.is_full[:layers].tobytes()
