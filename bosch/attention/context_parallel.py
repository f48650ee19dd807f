"""Attention of a sequence that is split over processes: sliding heads are sent their halo alone.

Each process holds two chunks of every sequence (`ContextSplit`) and computes their queries. Full
heads gather all keys and values; the heads of each window are sent the tokens before the chunks,
as far as the window reaches, and the sinks. Gradients take the same ways back.

Shapes: B rows, n processes, C tokens of a chunk, T = 2nC of a sequence, HQ query heads, HKV
key/value heads, HG of a group, D head dimension of keys and values together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.attention import AttentionCall, compute_attention
from bosch.attention.context import AttentionContext
from bosch.attention.layout import HeadGroup, HeadLayout
from bosch.context_split import ContextSplit
from bosch.window import Window

_NO_DOCUMENT = -1


class Messages:
    """What the processes of one split send each other; `sent_bytes` counts what this one sends."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def all_gather(self, own: Tensor) -> Tensor:
        """`own` of every process, [n, ...]."""
        own = own.contiguous()
        out = own.new_empty(self.ranks, *own.shape)
        dist.all_gather_single(out.flatten(0, 1), own, group=self.group)
        self.sent_bytes += (self.ranks - 1) * own.nbytes
        return out

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """`sent` says how many of the rows go to each process, `received` how many come of each."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        per_row = rows.element_size() * (rows.numel() // max(1, len(rows)))
        self.sent_bytes += per_row * (sum(sent) - sent[self.rank])
        return out


class _Gathered(torch.autograd.Function):
    """States of all processes, [n, ...]; the gradients of each one's own are summed in float32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        return messages.all_gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        each = [1] * ctx.messages.ranks
        parts = ctx.messages.all_to_all(grad, each, each)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return parts.sum(0, dtype=dtype).to(grad.dtype), None


class _Exchanged(torch.autograd.Function):
    """Rows of all processes that this one needs; their gradients go back to where they are from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], messages: Messages
    ) -> Tensor:
        ctx.ways = sent, received, messages
        return messages.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, messages = ctx.ways
        return messages.all_to_all(grads[0], received, sent), None, None, None


@dataclass(frozen=True)
class _Halo:
    """What the heads of one window exchange in a pass, as rows of [B * 2C, HG, D].

    `sent`: which of its own rows this process sends, in the order of the processes,
    `sent_counts` of them to each. `before`: for each of the two chunks, where the keys that stand
    before it are among its own rows and the received ones, [B, K].
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    before: tuple[Tensor, Tensor]


class SplitPass:
    """One pass over sequences that are split: what each layer exchanges, and what chunks see.

    `document` [B, T] numbers the documents of the whole sequences, on the CPU; None for one each.
    """

    def __init__(
        self,
        split: ContextSplit,
        rows: int,
        document: Tensor | None,
        messages: Messages,
        device: torch.device,
    ) -> None:
        self.split, self.rows, self.messages, self.device = split, rows, messages, device
        self._document = document
        self._slots = torch.arange(rows * split.length).view(rows, -1)
        self._halos: dict[Window, _Halo] = {}
        self._contexts: dict[tuple[int, Window | None], AttentionContext] = {}

    def halo(self, window: Window) -> _Halo:
        """The exchange of the heads with this window."""
        if window not in self._halos:
            self._halos[window] = self._make_halo(window)
        return self._halos[window]

    def context(self, chunk: int, window: Window | None) -> AttentionContext:
        """What a chunk's queries see of the keys before them and their own."""
        if (chunk, window) not in self._contexts:
            size, start = self.split.chunk, chunk * self.split.chunk
            before = torch.arange(start).expand(self.rows, -1)
            shown = torch.ones_like(before, dtype=torch.bool)
            if window is not None:
                before, shown = self._before(chunk, window)
            document = None
            if self._document is not None:
                of_keys = self._document.gather(1, before).masked_fill(~shown, _NO_DOCUMENT)
                own = self._document[:, start : start + size]
                document = torch.cat([of_keys, own], dim=1).to(self.device)
            context = AttentionContext(size, before.shape[1], document=document)
            self._contexts[chunk, window] = context
        return self._contexts[chunk, window]

    def last_seen(self, window: Window | None, seen: Tensor) -> Tensor:
        """Keys and values [B, HG, T, D] of which the last chunk sees `seen` [B, HG, K + C, D].

        What it does not see is 0; no later token will see it either.
        """
        if window is None:
            return seen
        split = self.split
        slots = self._before(2 * split.ranks - 1, window)[0].to(seen.device)
        rows, heads, _, size = seen.shape
        whole = seen.new_zeros(rows, heads, split.length, size)
        whole[:, :, split.length - split.chunk :] = seen[:, :, slots.shape[1] :]
        places = slots[:, None, :, None].expand(-1, heads, -1, size)
        return whole.scatter_(2, places, seen[:, :, : slots.shape[1]])

    def _before(self, chunk: int, window: Window) -> tuple[Tensor, Tensor]:
        """Slots of the keys that stand before a chunk, and whether they count: [B, K] each.

        First the sinks that lie before the halo, of the document that reaches into it, then the
        halo: with their documents' numbers, distance and rank of each are as in the sequence, as
        far as they matter. Where rows have fewer such sinks, the first places do not count.
        """
        start = self.split.halo_start(chunk, window)
        halo = torch.arange(start, chunk * self.split.chunk).expand(self.rows, -1)
        begins = torch.zeros(self.rows, 1, dtype=torch.long)
        if self._document is not None:
            same = self._document[:, :start] == self._document[:, start : start + 1]
            begins = start - same.sum(1, keepdim=True)  # numbers rise, so these stand together
        counts = (start - begins).clamp(max=window.sinks)
        place = torch.arange(-int(counts.max()), 0).expand(self.rows, -1)
        shown = place >= -counts
        sinks = (begins + counts + place).where(shown, start)
        whole = torch.ones_like(halo, dtype=torch.bool)
        return torch.cat([sinks, halo], dim=1), torch.cat([shown, whole], dim=1)

    def _make_halo(self, window: Window) -> _Halo:
        split, rank, size = self.split, self.messages.rank, self.split.chunk
        chunk = torch.arange(split.length) // size
        owner = torch.minimum(chunk, 2 * split.ranks - 1 - chunk).repeat(self.rows)
        first_row = torch.arange(self.rows)[:, None]
        needs = []
        for other in range(split.ranks):
            needed = torch.zeros(self.rows, split.length, dtype=torch.bool)
            for one in split.chunks_of(other):
                slots, shown = self._before(one, window)
                needed[first_row.expand_as(slots)[shown], slots[shown]] = True
            slots = needed.flatten().nonzero()[:, 0]
            slots = slots[owner[slots] != other]
            needs.append(slots[owner[slots].argsort(stable=True)])  # in the order they come in
        places = torch.zeros(self.rows * split.length, dtype=torch.long)
        chunks = torch.split(self._slots, size, dim=1)
        own = torch.cat([chunks[c] for c in split.chunks_of(rank)], dim=1)
        places[own.flatten()] = torch.arange(own.numel())
        sent = [places[slots[owner[slots] == rank]] for slots in needs]
        # What is not its own has been a place of 0 so far, and is sent by nobody to itself.
        places[needs[rank]] = own.numel() + torch.arange(len(needs[rank]))
        before = [
            places[self._slots.gather(1, self._before(c, window)[0])].to(self.device)
            for c in split.chunks_of(rank)
        ]
        return _Halo(
            torch.cat(sent).to(self.device),
            [len(rows) for rows in sent],
            torch.bincount(owner[needs[rank]], minlength=split.ranks).tolist(),
            (before[0], before[1]),
        )


def split_attention(
    call: AttentionCall,
    current: SplitPass,
    last_seen: list[tuple[Tensor, ...]] | None = None,
) -> Tensor:
    """As `hybrid_attention`, for this process's two chunks side by side: [B, 2C, HQ, D].

    The call has query [B, HQ, 2C, D], key and value [B, HKV, 2C, D]; its context is not read.
    Called on all processes of the split.
    `last_seen`, where given, gets of each group the keys and values that the second chunk sees.
    """
    call = call.autocast()
    query, key, value, layout = call.query, call.key, call.value, call.layout
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    sizes = [key.shape[-1], value.shape[-1]]
    outputs = []
    for group in layout.groups:
        heads = layout.heads_of(query, group, q_per_kv)
        states = torch.cat([layout.heads_of(x, group) for x in (key, value)], dim=-1)
        keys = _all_keys(states, current) if group.window is None else _near(states, group, current)
        transform = call.transform.of(layout, group, q_per_kv)
        if last_seen is not None:
            last_seen.append(torch.split(keys[1], sizes, dim=-1))
        of_chunks = []
        chunks = current.split.chunks_of(current.messages.rank)
        for chunk, queries, seen in zip(chunks, heads.chunk(2, dim=2), keys, strict=True):
            of_keys, of_values = torch.split(seen, sizes, dim=-1)
            seen_by = current.context(chunk, group.window)
            part = AttentionCall(
                queries, of_keys, of_values, _alone(group), seen_by, transform, call.backend
            )
            of_chunks.append(compute_attention(part).transpose(1, 2))
        outputs.append(torch.cat(of_chunks, dim=2))
    return layout.merge(outputs, q_per_kv)


@functools.cache
def _alone(group: HeadGroup) -> HeadLayout:
    """The layout of a group's heads by themselves."""
    return HeadLayout.deploy({group.window: len(group.heads)})


def _all_keys(states: Tensor, current: SplitPass) -> list[Tensor]:
    """Keys and values up to the end of each chunk, [B, HG, Tk, D], of states [B, HG, 2C, D]."""
    size = current.split.chunk
    gathered: Tensor = _Gathered.apply(states, current.messages)  # type: ignore[no-untyped-call]
    first, second = torch.split(gathered, size, dim=3)
    whole = torch.cat([*first.unbind(), *second.flip(0).unbind()], dim=2)
    chunks = current.split.chunks_of(current.messages.rank)
    return [whole[:, :, : (chunk + 1) * size] for chunk in chunks]


def _near(states: Tensor, group: HeadGroup, current: SplitPass) -> list[Tensor]:
    """Sinks, halo and chunk of each of the two chunks, [B, HG, K + C, D]."""
    assert group.window is not None
    halo = current.halo(group.window)
    own = states.transpose(1, 2).flatten(0, 1)  # [B * 2C, HG, D]
    received: Tensor = _Exchanged.apply(  # type: ignore[no-untyped-call]
        own.index_select(0, halo.sent), halo.sent_counts, halo.received_counts, current.messages
    )
    every = torch.cat([own, received])
    keys = []
    for before, chunk in zip(halo.before, states.chunk(2, dim=2), strict=True):
        earlier = every.index_select(0, before.flatten()).view(*before.shape, *every.shape[1:])
        keys.append(torch.cat([earlier.transpose(1, 2), chunk], dim=2))
    return keys
