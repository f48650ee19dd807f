"""Layer-wise steps: attention that slides learns the original's output in its place.

The attention of each layer with sliding heads gets the input that it has in the original, and is
trained towards the output there (RADLADS, arXiv 2505.03005; Attention Editing, arXiv 2604.05688).
No gradient leaves it, so these modules alone are trained.

Shapes: B sequences of a micro-batch, T tokens of one, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from bosch.hybrid import attention_of
from bosch.model.configuration import hybrid_mask
from bosch.model.families import decoder_layers
from bosch.model.interface import attention_modules

# Arguments of an attention module by position and by name, and its output [B, T, C].
Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]


@contextmanager
def recorded_attention(model: Any) -> Iterator[list[Call]]:
    """In a pass of this block, the calls of the attention modules: one for each row of a mask."""
    calls: list[Call] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args, kwargs, output[0]))

    modules = attention_modules(model)
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def attention_error(attention: nn.Module, call: Call) -> Tensor:
    """Squared error of the output over the squared output of `call`, for each sequence: [B]."""
    args, kwargs, output = call
    target = output.float()
    error = attention(*args, **kwargs)[0].float() - target
    return error.square().sum((1, 2)) / target.square().sum((1, 2))


def _error_of_layer(layer: nn.Module, call: Call) -> Tensor:
    return attention_error(attention_of(layer)[0], call)


class LayerWiseLoss:
    """`attention_error`, the mean over a hybrid's layers with sliding heads, summed over sequences.

    With `recomputes` only the original's inputs and outputs are kept for the backward pass.
    """

    def __init__(self, model: Any, teacher: Any, recomputes: bool) -> None:
        """For a `model` that FSDP has sharded: it gathers a layer's weights in methods it knows."""
        self._teacher, self._recomputes = teacher, recomputes
        numbers, rows = decoder_layers(model.config).full, hybrid_mask(model.config).windows
        layers = model.get_decoder().layers
        self._layers = {row: layers[number] for row, number in enumerate(numbers) if any(rows[row])}
        for layer in self._layers.values():
            layer.attention_error = MethodType(_error_of_layer, layer)
            register_fsdp_forward_method(layer, "attention_error")

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """The loss of a micro-batch of ids and positions, [B, T] each."""
        with torch.no_grad(), recorded_attention(self._teacher) as calls:
            self._teacher(input_ids, position_ids)
        errors: list[Tensor] = []
        for row, layer in self._layers.items():
            if self._recomputes:
                errors.append(checkpoint(layer.attention_error, calls[row], use_reentrant=False))
            else:
                errors.append(layer.attention_error(calls[row]))
        return torch.stack(errors).mean(0).sum()
