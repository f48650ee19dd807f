"""Context parallelism: sequences split over n processes, of which each computes two chunks.

A sequence of T tokens is cut into 2n chunks of C = T / 2n. Process r of n holds the chunks r and
2n - 1 - r: under causal attention a late chunk sees more keys than an early one, so this balances
the work. For a full head each process receives the keys and values of all tokens (all-gather), also
of later ones, which it does not use. For a sliding head with window W it receives, for each of the
two chunks, the W - 1 tokens before it (its halo, which may span several chunks) and the sinks.
Gradients go the same way back.

Shapes: B rows, HQ query heads, HKV key/value heads, HG of a group, K keys before a chunk, D head
dimension, DKV that of a key and its value together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.errors import RunError, UserError
from bosch.hybrid import (
    AttentionCall,
    AttentionContext,
    HeadGroup,
    HeadLayout,
    Window,
    compute_attention,
    head_state,
    hybrid_modules,
    required_state,
    set_head_state,
)
from bosch.model.families import split_fault

_NO_DOCUMENT = -1


@dataclass(frozen=True)
class ContextSplit:
    """`length` tokens over `ranks` processes; ValueError unless they make 2n equal chunks."""

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.length % (2 * self.ranks):
            raise ValueError(f"{self.length} tokens cannot be cut into {2 * self.ranks} chunks")

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, C."""
        return self.length // (2 * self.ranks)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The two chunks of a process, in order."""
        return rank, 2 * self.ranks - 1 - rank

    def halo_start(self, chunk: int, window: Window) -> int:
        """First slot, apart from sinks, that a sliding head sees from a chunk."""
        return max(0, chunk * self.chunk - window.past)


class Communicator:
    """Collective operations of the processes of a split; `sent_bytes` is what this one has sent."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def all_gather(self, local: Tensor) -> Tensor:
        """`local` [...] of all processes, stacked: [n, ...]."""
        local = local.contiguous()
        out = local.new_empty(self.ranks, *local.shape)
        dist.all_gather_single(out.flatten(0, 1), local, group=self.group)
        self.sent_bytes += (self.ranks - 1) * local.nbytes
        return out

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All processes' rows for this one, in order; `sent`, `received`: rows to and from each."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        per_row = rows.element_size() * (rows.numel() // max(1, len(rows)))
        self.sent_bytes += per_row * (sum(sent) - sent[self.rank])
        return out


class _Gathered(torch.autograd.Function):
    """States of all processes, [n, ...]; backward sums their gradients, at least in float32."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        each = [1] * ctx.communicator.ranks
        parts = ctx.communicator.all_to_all(grad, each, each)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return parts.sum(0, dtype=dtype).to(grad.dtype), None


class _Exchanged(torch.autograd.Function):
    """Rows that this process receives from all others; backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], communicator: Communicator
    ) -> Tensor:
        ctx.exchange = sent, received, communicator
        return communicator.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, communicator = ctx.exchange
        return communicator.all_to_all(grads[0], received, sent), None, None, None


@dataclass(frozen=True)
class _Halo:
    """The rows [B * 2C, HG, DKV] that the heads of one window exchange in a pass.

    `sent`: indices of the rows to send, ordered by receiving process, `sent_counts` to each.
    `received_counts`: rows from each process. `before`: for each of this process's two chunks the
    indices [B, K] of the keys before it, into its own rows followed by the received ones.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    before: tuple[Tensor, Tensor]


class SplitPass:
    """One pass over split sequences: the layers' exchanges, and the keys that each chunk sees.

    `document` [B, T], on the CPU, numbers each row's documents from left to right; None for one.
    """

    def __init__(
        self,
        split: ContextSplit,
        rows: int,
        document: Tensor | None,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.split, self.rows, self.communicator, self.device = split, rows, communicator, device
        self._document = document
        # Tokens of all rows, numbered row after row, and the process that holds each.
        self._tokens = torch.arange(rows * split.length).view(rows, -1)
        chunk = torch.arange(split.length) // split.chunk
        self._owner = torch.minimum(chunk, 2 * split.ranks - 1 - chunk).repeat(rows)
        self._halos: dict[Window, _Halo] = {}
        self._contexts: dict[tuple[int, Window | None], AttentionContext] = {}

    def halo(self, window: Window) -> _Halo:
        """The exchange of the heads with this window."""
        if window not in self._halos:
            self._halos[window] = self._make_halo(window)
        return self._halos[window]

    def context(self, chunk: int, window: Window | None) -> AttentionContext:
        """The context of a chunk: its queries over the keys before it and its own keys."""
        if (chunk, window) not in self._contexts:
            size, start = self.split.chunk, chunk * self.split.chunk
            before = torch.arange(start).expand(self.rows, -1)
            is_key = torch.ones_like(before, dtype=torch.bool)
            if window is not None:
                before, is_key = self._slots_before(chunk, window)
            document = None
            if self._document is not None:
                earlier = self._document.gather(1, before).masked_fill(~is_key, _NO_DOCUMENT)
                chunk_document = self._document[:, start : start + size]
                document = torch.cat([earlier, chunk_document], dim=1).to(self.device)
            context = AttentionContext(size, before.shape[1], document=document)
            self._contexts[chunk, window] = context
        return self._contexts[chunk, window]

    def _slots_before(self, chunk: int, window: Window) -> tuple[Tensor, Tensor]:
        """Slots of the keys before a chunk that its queries may see, and which are keys: [B, K].

        First the sinks before the halo, of the document that reaches into it, then the halo. So
        within each document the distances to keys in the window, and which keys are sinks, are the
        same as in the whole sequence. Rows with fewer sinks are padded on the left.
        """
        start = self.split.halo_start(chunk, window)
        halo = torch.arange(start, chunk * self.split.chunk).expand(self.rows, -1)
        begins = torch.zeros(self.rows, 1, dtype=torch.long)
        if self._document is not None:
            same = self._document[:, :start] == self._document[:, start : start + 1]
            begins = start - same.sum(1, keepdim=True)  # numbers rise, so these are consecutive
        counts = (start - begins).clamp(max=window.sinks)
        offset = torch.arange(-int(counts.max()), 0).expand(self.rows, -1)
        is_sink = offset >= -counts
        sinks = (begins + counts + offset).where(is_sink, start)
        is_key = torch.cat([is_sink, torch.ones_like(halo, dtype=torch.bool)], dim=1)
        return torch.cat([sinks, halo], dim=1), is_key

    def _make_halo(self, window: Window) -> _Halo:
        split, rank = self.split, self.communicator.rank
        received = [self._received_tokens(process, window) for process in range(split.ranks)]
        chunks = torch.split(self._tokens, split.chunk, dim=1)
        local = torch.cat([chunks[c] for c in split.chunks_of(rank)], dim=1)
        # Index of each token in this process's own rows followed by the received ones.
        index = torch.zeros(self._tokens.numel(), dtype=torch.long)
        index[local.flatten()] = torch.arange(local.numel())
        sent = [index[tokens[self._owner[tokens] == rank]] for tokens in received]
        index[received[rank]] = local.numel() + torch.arange(len(received[rank]))
        first, second = (
            index[self._tokens.gather(1, self._slots_before(c, window)[0])].to(self.device)
            for c in split.chunks_of(rank)
        )
        return _Halo(
            torch.cat(sent).to(self.device),
            [len(rows) for rows in sent],
            torch.bincount(self._owner[received[rank]], minlength=split.ranks).tolist(),
            (first, second),
        )

    def _received_tokens(self, process: int, window: Window) -> Tensor:
        """The tokens that a process must receive, ordered by sending process."""
        needed = torch.zeros(self._tokens.numel(), dtype=torch.bool)
        for chunk in self.split.chunks_of(process):
            slots, is_key = self._slots_before(chunk, window)
            needed[self._tokens.gather(1, slots)[is_key]] = True
        tokens = needed.nonzero()[:, 0]
        tokens = tokens[self._owner[tokens] != process]
        return tokens[self._owner[tokens].argsort(stable=True)]


def split_attention(call: AttentionCall, split_pass: SplitPass) -> Tensor:
    """`hybrid_attention` of the two chunks that this process holds: [B, 2C, HQ, D].

    The call has query [B, HQ, 2C, D], key and value [B, HKV, 2C, D]; its context is not read. All
    processes must call it.
    """
    call = call.autocast()
    query, key, value, layout = call.query, call.key, call.value, call.layout
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    q_per_kv = query.shape[1] // layout.num_key_value_heads
    sizes = [key.shape[-1], value.shape[-1]]
    chunks = split_pass.split.chunks_of(split_pass.communicator.rank)
    outputs = []
    for group in layout.groups:
        window, group_layout = group.window, _layout_of(group)
        heads = layout.heads_of(query, group, q_per_kv)
        states = torch.cat([layout.heads_of(x, group) for x in (key, value)], dim=-1)
        keys = _near_keys(states, window, split_pass) if window else _all_keys(states, split_pass)
        transform = call.transform.of(layout, group, q_per_kv)
        parts = []
        for chunk, queries, seen in zip(chunks, heads.chunk(2, dim=2), keys, strict=True):
            keys_seen, values_seen = torch.split(seen, sizes, dim=-1)
            context = split_pass.context(chunk, window)
            part = AttentionCall(
                queries, keys_seen, values_seen, group_layout, context, transform, call.backend
            )
            parts.append(compute_attention(part).transpose(1, 2))
        outputs.append(torch.cat(parts, dim=2))
    return layout.merge(outputs, q_per_kv)


@functools.cache
def _layout_of(group: HeadGroup) -> HeadLayout:
    """The layout of tensors with the heads of one group only."""
    window = group.window or Window(0)
    return HeadLayout.of([window.size] * len(group.heads), window.sinks)


def _all_keys(states: Tensor, split_pass: SplitPass) -> list[Tensor]:
    """Keys and values up to the end of each chunk, [B, HG, Tk, DKV], from those of this process."""
    size = split_pass.split.chunk
    gathered: Tensor = _Gathered.apply(states, split_pass.communicator)
    first, second = torch.split(gathered, size, dim=3)
    whole = torch.cat([*first.unbind(), *second.flip(0).unbind()], dim=2)
    chunks = split_pass.split.chunks_of(split_pass.communicator.rank)
    return [whole[:, :, : (chunk + 1) * size] for chunk in chunks]


def _near_keys(states: Tensor, window: Window, split_pass: SplitPass) -> list[Tensor]:
    """Keys and values of sinks, halo and chunk itself, for each chunk: [B, HG, K + C, DKV]."""
    halo = split_pass.halo(window)
    local = states.transpose(1, 2).flatten(0, 1)  # [B * 2C, HG, DKV]
    exchange = halo.sent_counts, halo.received_counts, split_pass.communicator
    sent = local.index_select(0, halo.sent)
    received: Tensor = _Exchanged.apply(sent, *exchange)
    rows = torch.cat([local, received])
    keys = []
    for before, chunk in zip(halo.before, states.chunk(2, dim=2), strict=True):
        earlier = rows.index_select(0, before.flatten()).view(*before.shape, *rows.shape[1:])
        keys.append(torch.cat([earlier.transpose(1, 2), chunk], dim=2))
    return keys


class ContextParallel:
    """Splits the sequences of models over the processes of `group`; one object for each process.

    Every process computes its part of each sequence: it calls `begin`, then the model, then `whole`
    if results of all tokens are needed. Installed models share the current pass.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.communicator = Communicator(group)
        self.ranks = self.communicator.ranks  # processes that share each sequence
        self._current: SplitPass | None = None

    def install(self, model: PreTrainedModel) -> None:
        """Make every layer exchange keys and values; UserError if `model` cannot be split."""
        fault = split_fault(model.config)
        if fault is not None:
            raise UserError(f"runtime.context_parallel: the model cannot be split: {fault}; set 1")
        for module in _attention_modules(model):
            set_head_state(module, replace(required_state(module), attend=self._attend))

    def check(self, model: PreTrainedModel) -> None:
        """Raise RunError if a layer of `model` would compute attention only within a chunk."""
        states = [head_state(module) for module in _attention_modules(model)]
        if not all(state is not None and state.attend == self._attend for state in states):
            raise RunError("runtime.context_parallel: a layer of the model does not take part")

    def begin(
        self, rows: int, length: int, positions: Tensor | None, device: torch.device
    ) -> Tensor:
        """Begin a pass over `rows` sequences of `length` tokens; returns local positions [B, 2C].

        `positions` [B, T] restart with each document; None means one document per sequence.
        """
        document = None
        if positions is None:
            positions = torch.arange(length, device=device)[None]
        else:
            restarts = (positions[:, 1:] != positions[:, :-1] + 1).cpu()
            document = nn.functional.pad(restarts.long(), (1, 0)).cumsum(-1)
        split = ContextSplit(length, self.ranks)
        self._current = SplitPass(split, rows, document, self.communicator, device)
        return self.local(positions)

    def local(self, values: Tensor) -> Tensor:
        """This process's tokens of values [B, T]: [B, 2C]."""
        assert self._current is not None
        chunks = torch.split(values, self._current.split.chunk, dim=1)
        chunk_numbers = self._current.split.chunks_of(self.communicator.rank)
        return torch.cat([chunks[chunk] for chunk in chunk_numbers], dim=1)

    def _attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """As `compute_attention` for local tokens of whole sequences; the context is ignored."""
        assert self._current is not None
        return split_attention(call, self._current)


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in hybrid_modules(model) if module is not None]
