"""Temporary changes of a decoder for one pass: attention, recomputation, frozen parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bosch.hybrid import Attend, HeadState, head_state, set_head_state


@contextlib.contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """Temporarily set requires_grad=False."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def replace_attention(module: nn.Module, attend: Attend) -> Iterator[None]:
    """Temporarily replace the attention function of one layer's attention module."""
    state = head_state(module)
    assert state is not None
    set_head_state(module, HeadState(state.layout, state.backend, attend))
    try:
        yield
    finally:
        set_head_state(module, state)


@contextlib.contextmanager
def recompute_layers(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily store only each decoder layer's input for a backward pass.

    The backward pass recomputes one layer at a time, bit for bit. Weights are frozen.
    """
    layers = model.get_decoder().layers
    forwards = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.forward
            if forward is not None:  # one that was set on the instance
                layer.forward = forward
