"""Exact reuse of the layers below the lowest one that changes between two passes.

A decoder layer is a function of its input. While every layer below l keeps its row of the mask, the
input of layer l stays the same, so it is kept and the layers below are passed over. The
result is the same bit for bit; a pass that finds it otherwise switches the reuse off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bosch.heads import HeadMask


class PrefixReuse:
    """Inputs of one layer, for as many batches as fit into `max_bytes`."""

    def __init__(self, layers: nn.ModuleList, max_bytes: int) -> None:
        self.layers, self.max_bytes = layers, max_bytes
        self.enabled = max_bytes > 0 and len(layers) > 1
        self._layer = 0
        self._rows = b""
        self._states: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}
        self._pending_layer = 0

    def begin(self, mask: HeadMask, shared_layers: int) -> None:
        """Start a pass with `mask`; the next masks will agree with it below `shared_layers`."""
        if not self.enabled:
            return
        if self._states and _rows(mask, self._layer) != self._rows:
            self._states, self._layer = {}, 0
        self._pending = {}
        kept_deep_enough = bool(self._states) and self._layer >= shared_layers
        self._pending_layer = 0 if kept_deep_enough else shared_layers

    def finish(self, mask: HeadMask) -> None:
        """End of a pass: what it kept replaces what was kept before."""
        if self._pending:
            self._states, self._layer = self._pending, self._pending_layer
            self._rows = _rows(mask, self._layer)
        self._pending, self._pending_layer = {}, 0

    def first_layer(self, batch: int) -> int:
        """Layer at which the pass over a batch may start."""
        return self._layer if self.enabled and batch in self._states else 0

    @contextlib.contextmanager
    def batch(self, batch: int, *, whole: bool = False) -> Iterator[None]:
        """Around the decoder's forward of one batch; `whole` computes every layer."""
        with contextlib.ExitStack() as stack:
            start = 0 if whole else self.first_layer(batch)
            if start > 0:
                stack.enter_context(_started_at(self.layers, start, self._states[batch]))
            if self.enabled and self._pending_layer > 0:
                stack.callback(self._watch(batch).remove)
            yield

    def disable(self) -> None:
        """Keep and reuse nothing from now on."""
        self.enabled = False
        self._states, self._pending = {}, {}

    def _watch(self, batch: int) -> Any:
        """Keep the input of the pending layer."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            used = sum(s.nbytes for i, s in self._pending.items() if i != batch)
            if used + state.nbytes <= self.max_bytes:
                self._pending[batch] = state.detach().clone()

        layer = self.layers[self._pending_layer]
        return layer.register_forward_pre_hook(keep, with_kwargs=True)


@contextlib.contextmanager
def _started_at(layers: nn.ModuleList, start: int, state: Tensor) -> Iterator[None]:
    """Pass over the layers below `start` and hand `state` to it."""

    def replace(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (state.clone(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": state.clone()}

    hook = layers[start].register_forward_pre_hook(replace, with_kwargs=True)
    skipped = list(layers)[:start]
    try:
        for layer in skipped:
            layer.forward = _unchanged
        yield
    finally:
        hook.remove()
        for layer in skipped:
            layer.__dict__.pop("forward", None)


def _unchanged(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _rows(mask: HeadMask, layers: int) -> bytes:
    return mask.is_full[:layers].tobytes()


def returns_tensor(decoder: Any, input_ids: Tensor) -> bool:
    """Whether the decoder's layers return their hidden state and nothing else."""
    outputs: list[bool] = []
    hooks = [
        layer.register_forward_hook(lambda m, a, out: outputs.append(isinstance(out, Tensor)))
        for layer in decoder.layers
    ]
    try:
        with torch.inference_mode():
            decoder(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return all(outputs)
