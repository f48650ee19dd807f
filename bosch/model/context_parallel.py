"""A model whose sequences are split over processes: each computes two chunks of each sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bosch.attention.call import AttentionCall
from bosch.attention.context_parallel import Communicator, SplitPass, split_attention
from bosch.context_split import ContextSplit
from bosch.errors import RunError, UserError
from bosch.model.families import split_fault
from bosch.model.interface import (
    attention_module,
    head_state,
    layouts_of,
    required_state,
    set_head_state,
)


class ContextParallel:
    """Splits the sequences of models over the processes of `group`; one object for each process.

    Every process computes its part of each sequence: it calls `begin`, then the model, then `whole`
    if results of all tokens are needed. Installed models share the current pass.
    """

    def __init__(self, group: Any) -> None:
        self.communicator = Communicator(group)
        self.ranks = self.communicator.ranks  # processes that share each sequence
        self._current: SplitPass | None = None

    def install(self, model: Any) -> None:
        """Make every layer exchange keys and values; UserError if `model` cannot be split."""
        fault = split_fault(model.config)
        if fault is not None:
            raise UserError(f"runtime.context_parallel: the model cannot be split: {fault}; set 1")
        for module in _attention_modules(model):
            set_head_state(module, replace(required_state(module), attend=self._attend))

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

    def _attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """As `compute_attention` for local tokens of whole sequences; the context is ignored."""
        assert self._current is not None
        return split_attention(call, self._current)


def _attention_modules(model: Any) -> list[nn.Module]:
    layouts = layouts_of(model)
    return [attention_module(model, n) for n, layout in enumerate(layouts) if layout is not None]
