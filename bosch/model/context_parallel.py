"""A model whose sequences are split over processes: each computes two chunks of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bosch.attention.call import AttentionCall
from bosch.attention.context import AttentionContext
from bosch.attention.context_parallel import Communicator, SplitPass, split_attention
from bosch.context_split import ContextSplit
from bosch.errors import RunError, UserError
from bosch.model.cache import HybridCache
from bosch.model.families import split_fault
from bosch.model.interface import (
    attention_module,
    head_state,
    layouts_of,
    required_state,
    set_head_state,
)

# Keys and values that the last chunk of a sequence sees, by group of a layer's heads.
_LastSeen: TypeAlias = list[tuple[Tensor, ...]]


class ContextParallel:
    """Splits the sequences of models over the processes of `group`; one object for each process.

    Every process computes its part of each sequence: it calls `begin`, then the model, then `whole`
    if results of all tokens are needed. Installed models share the current pass.
    """

    def __init__(self, group: Any) -> None:
        self.communicator = Communicator(group)
        self.ranks = self.communicator.ranks  # processes that share each sequence
        self._current: SplitPass | None = None
        self._fill: Callable[[nn.Module, _LastSeen], None] | None = None

    def install(self, model: Any) -> None:
        """Make every layer exchange keys and values; UserError if `model` cannot be split."""
        fault = split_fault(model.config)
        if fault is not None:
            raise UserError(f"runtime.context_parallel: the model cannot be split: {fault}; set 1")
        for module in _attention_modules(model):
            set_head_state(module, replace(required_state(module), attend=self._attend))

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """`install` on a model within a `with` block."""
        states = [(module, head_state(module)) for module in _attention_modules(model)]
        self.install(model)
        try:
            yield
        finally:
            for module, state in states:
                set_head_state(module, state)

    def check(self, model: Any) -> None:
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

    def inputs(self, input_ids: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Begin a pass over sequences [B, T]; returns the decoder's arguments, for local tokens.

        `positions` as in `begin`. Padding at the end is hidden from all tokens before it.
        """
        input_ids = self.whole_chunks(input_ids)
        if positions is not None:
            steps = torch.arange(1, input_ids.shape[1] - positions.shape[1] + 1).to(positions)
            positions = torch.cat([positions, positions[:, -1:] + steps], dim=1)
        rows, whole = input_ids.shape
        local_positions = self.begin(rows, whole, positions, input_ids.device)
        return {"input_ids": self.local(input_ids), "position_ids": local_positions}

    def whole_chunks(self, values: Tensor) -> Tensor:
        """Values [B, T] padded with zeros at the end to whole chunks."""
        length = values.shape[1]
        whole = ContextSplit.padded(length, self.ranks).length
        return nn.functional.pad(values, (0, whole - length))

    @torch.inference_mode()
    def read(self, model: Any, input_ids: Tensor, mask: Tensor) -> HybridCache | None:
        """Prefill prompts [B, T], padded on the left where `mask` is 0; returns the cache.

        The first process gets the cache, the others None. It holds the last chunk of each sequence
        and so already has all keys that generated tokens will see. Called on all processes; the
        model is in search or deploy mode and must not be installed.
        """
        length, before, valid = input_ids.shape[1], 0, mask
        padded = ContextSplit.padded(length, self.ranks)
        # Padding at the end must fit into the last chunk, or its halo would end too late.
        if padded.length - length > padded.chunk:
            before = padded.length - length
            input_ids, mask = (nn.functional.pad(x, (before, 0)) for x in (input_ids, mask))
        padding = input_ids.shape[1] - mask.sum(1, keepdim=True)
        positions = None
        if bool(padding.any()):  # the padding becomes a separate document
            slots = torch.arange(input_ids.shape[1], device=mask.device).expand_as(mask)
            positions = slots.where(slots < padding, slots - padding)
        cache = HybridCache.of(model)
        layers = dict(zip(_attention_modules(model), cache.hybrid_layers, strict=True))
        context = AttentionContext(length, valid=None if bool(valid.all()) else valid.bool())

        def fill(module: nn.Module, last_seen: _LastSeen) -> None:
            assert self._current is not None
            layer = layers[module]
            layer.lazy_initialization(*last_seen[0])
            for cached, seen in zip(layer.groups, last_seen, strict=True):
                window = cached.group.window
                cached.keys, cached.values = (
                    self._current.in_sequence(window, states)[:, :, before : before + length]
                    for states in seen
                )
            layer.length = length
            layer.settle(context)

        self._fill = fill if self.communicator.rank == 0 else None
        with self.installed(model):
            model.get_decoder()(**self.inputs(input_ids, positions), use_cache=False)
        self._fill = None
        return cache if self.communicator.rank == 0 else None

    def local(self, values: Tensor) -> Tensor:
        """This process's tokens of values [B, T]: [B, 2C]."""
        assert self._current is not None
        chunks = torch.split(values, self._current.split.chunk, dim=1)
        chunk_numbers = self._current.split.chunks_of(self.communicator.rank)
        return torch.cat([chunks[chunk] for chunk in chunk_numbers], dim=1)

    def whole(self, local: Tensor) -> Tensor:
        """Values of all tokens, [B, T], from each process's local [B, 2C]; without gradients."""
        first, second = self.communicator.all_gather(local.detach()).chunk(2, dim=2)
        return torch.cat([*first.unbind(), *second.flip(0).unbind()], dim=1)

    def local_columns(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the tokens at `columns` [N] are local, bool [N], and their local columns [N]."""
        assert self._current is not None
        size = self._current.split.chunk
        first, second = self._current.split.chunks_of(self.communicator.rank)
        chunk = columns // size
        return (chunk == first) | (chunk == second), columns % size + size * (chunk == second)

    def at(self, local: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Values [N, C] of the tokens at `rows`, `columns` [N], from each process's [B, 2C, C].

        All processes get all of them, without gradients.
        """
        is_local, places = self.local_columns(columns)
        values = local.new_zeros(len(columns), local.shape[2])
        values[is_local] = local[rows[is_local], places[is_local]].detach()
        return self.communicator.all_gather(values).sum(0)  # 0 in all processes but one

    def attention(self, call: AttentionCall, last_seen: _LastSeen | None = None) -> Tensor:
        """As `compute_attention` for local tokens of whole sequences; the context is ignored."""
        assert self._current is not None
        return split_attention(call, self._current, last_seen)

    def _attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Attention of a layer under its current layout."""
        last_seen: _LastSeen | None = None if self._fill is None else []
        output = self.attention(call, last_seen)
        if self._fill is not None and last_seen is not None:
            self._fill(module, last_seen)
        return output


def _attention_modules(model: Any) -> list[nn.Module]:
    layouts = layouts_of(model)
    return [attention_module(model, n) for n, layout in enumerate(layouts) if layout is not None]
