"""Positions, padding and documents of one forward pass, the same for all heads of a layer.

Shapes: B batch, T query tokens of the pass, Tk = q_offset + T key slots. A slot is a place in the
padded sequence; key slots run from 0, whether or not a cache still holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bosch.window import Window


@dataclass(eq=False)
class AttentionContext:
    """Positions of one pass, shared by all its layers; caches the masks that are derived from it.

    q_offset is the slot of the first query. `valid` [B, Tk] is False at padding, None without
    padding. `document` [B, Tk] numbers packed documents, only in a pass without padding and cache.
    `right_padded`: in a pass without past, all padding follows the real tokens; no real token can
    see it, so attention may ignore padding (the outputs of padded queries are not used).
    `start` []: slot of the first query as a tensor on the device, in a pass over a cache of fixed
    size. q_offset is then the last slot possible, and the key slots are all that the cache has.
    `covered`: least number of keys in the pass, 0 if it is not known.
    """

    q_length: int
    q_offset: int = 0
    valid: Tensor | None = None
    document: Tensor | None = None
    right_padded: bool = False
    start: Tensor | None = None
    covered: int = 0
    _memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def kv_length(self) -> int:
        """Tk: key slots of the pass."""
        return self.q_offset + self.q_length

    @property
    def is_plain(self) -> bool:
        """Whether visibility depends only on distance: one document, no padding to hide."""
        return (self.valid is None or self.right_padded) and self.document is None

    @property
    def end(self) -> int | Tensor:
        """Slot after the last query."""
        return self.kv_length if self.start is None else self.start + self.q_length

    def query_slots(self, device: torch.device) -> Tensor:
        """Slots of the queries, [1, T]."""
        first = self.q_offset if self.start is None else self.start
        return (torch.arange(self.q_length, device=device) + first)[None]

    def on(self, device: torch.device) -> AttentionContext:
        """This context on `device`, a copy if it is on another; layers may be on several."""

        def copy() -> AttentionContext:
            tables = {name: getattr(self, name) for name in ("valid", "document", "start")}
            moved = {name: x.to(device) for name, x in tables.items() if x is not None}
            return replace(self, _memo={"device": device}, **moved)

        first = self.memo("device", lambda: device)
        return self if first == device else self.memo(device, copy)

    def row(self, row: int) -> AttentionContext:
        """The padding and documents of one row, in a pass without `start`."""
        pick = slice(row, row + 1)
        valid, document = (None if x is None else x[pick] for x in (self.valid, self.document))
        return AttentionContext(self.q_length, self.q_offset, valid, document)

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, called once per pass and key; in a compiled pass it is called each time."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def visible(self, queries: Tensor, keys: Tensor, window: Window | None = None) -> Tensor:
        """Whether each query slot sees each key slot.

        queries [b, ..., m] and keys [b, ..., n] hold slots, b being B or 1; key slots outside
        0 .. Tk - 1 are invisible to queries inside. Full heads have window None. A padded query
        sees itself, so that no row is empty. Returns bool [b, ..., m, n].
        """
        q, k = queries[..., :, None], keys[..., None, :]
        distance = q - k
        visible = (distance >= 0) & (k >= 0) & (k < self.kv_length)
        if window is not None:
            near = distance < window.size
            if window.sinks:
                rank = self._at(self.rank(keys.device), keys)[..., None, :]
                near = near | (rank < window.sinks)
            visible = visible & near
        if self.document is not None:
            ids_q, ids_k = self._at(self.document, queries), self._at(self.document, keys)
            visible = visible & (ids_q[..., :, None] == ids_k[..., None, :])
        if self.valid is not None:
            visible = (visible & self._at(self.valid, keys)[..., None, :]) | (distance == 0)
        return visible

    def sink_slots(self, sinks: int, device: torch.device) -> Tensor:
        """Slots [b, sinks] of each row's first real tokens, Tk if missing; not for documents."""

        def make() -> Tensor:
            if self.valid is None:
                slots = torch.arange(sinks, device=device)
                return slots.clamp(max=self.kv_length)[None]
            numbers = torch.arange(1, sinks + 1, device=device).expand(self.valid.shape[0], -1)
            counted = self.valid.long().cumsum(-1)
            return torch.searchsorted(counted, numbers.contiguous())

        return self.memo(("sink_slots", sinks), make)

    def left_padding(self) -> list[int] | None:
        """Padding slots before each row's tokens.

        None without padding, with documents, or if a row has padding elsewhere.
        """
        valid = self.valid
        if valid is None or self.document is not None:
            return None

        def make() -> list[int] | None:
            slots = valid.shape[1] - valid.sum(-1)
            on_left = valid == (torch.arange(valid.shape[1], device=valid.device) >= slots[:, None])
            return slots.tolist() if bool(on_left.all()) else None

        return self.memo("left_padding", make)

    def document_starts(self) -> Tensor:
        """Slot at which the document of each slot starts, [B, Tk]."""
        document = self.document
        assert document is not None

        def make() -> Tensor:
            slots = torch.arange(self.kv_length, device=document.device).expand_as(document)
            first = torch.ones_like(document[:, :1], dtype=torch.bool)
            begins = torch.cat([first, document[:, 1:] != document[:, :-1]], dim=1)
            return torch.where(begins, slots, 0).cummax(dim=1).values

        return self.memo("document_starts", make)

    def document_lengths(self) -> list[list[int]]:
        """Tokens of each document of each row, in order."""

        def make() -> list[list[int]]:
            starts = self.document_starts()
            return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in starts]

        return self.memo("document_lengths", make)

    def rank(self, device: torch.device) -> Tensor:
        """Number of real tokens of the same document before each slot: [B or 1, Tk]."""

        def make() -> Tensor:
            slots = torch.arange(self.kv_length, device=device)[None]
            if self.document is not None:
                return slots - self.document_starts()
            if self.valid is not None:
                return self.valid.long().cumsum(-1) - self.valid.long()
            return slots

        return self.memo("rank", make)

    def _at(self, table: Tensor, slots: Tensor) -> Tensor:
        """table [B or 1, Tk] read at slots [b, ..., n], clamped into range: [B, ..., n]."""
        inside = slots.clamp(0, self.kv_length - 1)
        rows = max(table.shape[0], inside.shape[0])
        inside = inside.expand(rows, *inside.shape[1:])
        table = table.expand(rows, -1)
        return torch.gather(table, 1, inside.reshape(rows, -1)).reshape(inside.shape)
