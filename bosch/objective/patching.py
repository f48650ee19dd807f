"""Temporary changes of a decoder for one pass: layers, attention, gradients of parameters.

B batch, T tokens, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bosch.attention import AttentionCall
from bosch.model.families import Family
from bosch.model.interface import Attend, HeadState, head_state, set_head_state
from bosch.objective.flops import FEED_FORWARD
from bosch.objective.memory import RECOMPUTED_TOKENS

Step = Callable[[int, Callable[..., Tensor], Tensor, dict[str, Any]], Tensor]


@contextlib.contextmanager
def replace_layers(layers: list[nn.Module], family: Family, step: Step) -> Iterator[None]:
    """Temporarily call `step(number, forward, hidden_states, kwargs)` in place of each layer.

    `forward` and `step` return only hidden states, whatever the family's layers return.
    """
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):
            layer_forward: Any = layer.forward
            states = _first_output(layer_forward) if family.layers_return_weights else layer_forward
            names = tuple(inspect.signature(layer_forward).parameters)[1:]

            def forward(
                hidden_states: Tensor,
                *args: Any,
                _number: int = number,
                _states: Any = states,
                _names: tuple[str, ...] = names,
                **kw: Any,
            ) -> Any:
                by_name = dict(zip(_names, args, strict=False))
                result = step(_number, _states, hidden_states, kw | by_name)
                return (result, None) if family.layers_return_weights else result

            stack.enter_context(replace_forward(layer, forward))
        yield


def _first_output(forward: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs)[0]


@contextlib.contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Temporarily replace a module's forward; restores one that was set on the instance."""
    previous = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if previous is not None:
            module.__dict__["forward"] = previous


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
def recompute_layers(model: Any) -> Iterator[None]:
    """Temporarily store only each decoder layer's input for a backward pass.

    The backward pass recomputes one layer at a time, bit for bit: up to its feed-forward block,
    whose backward runs in pieces of tokens, then its attention. Weights are frozen.
    """
    with contextlib.ExitStack() as stack:
        for layer in model.get_decoder().layers:
            for name in FEED_FORWARD:
                if (block := getattr(layer, name, None)) is not None:
                    by_tokens = partial(_recomputed_by_tokens, block.forward)
                    stack.enter_context(replace_forward(block, by_tokens))
            recomputed = partial(checkpoint, layer.forward, use_reentrant=False)
            stack.enter_context(replace_forward(layer, recomputed))
        yield


def _recomputed_by_tokens(forward: Callable[..., Any], hidden: Tensor) -> Any:
    # Saved before the feed-forward block: a layer's recomputation ends at its last saved tensor,
    # so it skips the feed-forward block, unless a norm follows.
    saved = _Save.apply(hidden).grad_fn  # type: ignore[no-untyped-call]
    return _Tokenwise.apply(forward, hidden, saved)  # type: ignore[no-untyped-call]


class _Save(torch.autograd.Function):
    """Saves a tensor for the backward pass; the output is empty."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("nothing depends on the empty output")


class _Tokenwise(torch.autograd.Function):
    """A token-wise map that is recomputed from its input [B, T, C], a tensor of `saved`.

    Some families return further values, through which no gradient passes.
    """

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], hidden: Tensor, saved: Any) -> Any:
        ctx.forward, ctx.saved = forward, saved
        output = forward(hidden)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (hidden,) = ctx.saved.saved_tensors
        result = torch.empty_like(hidden)
        chunks = (x.split(RECOMPUTED_TOKENS, dim=1) for x in (hidden, gradients[0], result))
        for tokens, gradient, chunk in zip(*chunks, strict=True):
            with torch.enable_grad():
                leaf = tokens.detach().requires_grad_()
                output = ctx.forward(leaf)
            if isinstance(output, tuple):
                output = output[0]
            output.backward(gradient)
            chunk.copy_(leaf.grad)
        return None, result, None


class _KeysAndValues(Exception):
    """Ends a layer's forward as soon as its keys and values are known."""


def keys_and_values(
    attention: Any, forward: Callable[..., Tensor], state: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [B, HKV, T, D]; its forward runs until it calls its attention."""
    arguments: list[Any] = []

    def attend(module: nn.Module, call: AttentionCall) -> Tensor:
        arguments.extend((call.key, call.value))
        raise _KeysAndValues

    with contextlib.ExitStack() as stack:
        stack.enter_context(replace_attention(attention, attend))
        if hasattr(attention, "q_proj"):
            no_queries = partial(_zeros, attention.q_proj)
            stack.enter_context(replace_forward(attention.q_proj, no_queries))
        with contextlib.suppress(_KeysAndValues):
            forward(state, **kwargs)
    key, value = arguments
    return key, value


def _zeros(projection: nn.Linear, hidden: Tensor) -> Tensor:
    return hidden.new_zeros(*hidden.shape[:-1], projection.out_features)


@contextlib.contextmanager
def attention_outputs(attention: Any, family: Family, outputs: Tensor) -> Iterator[None]:
    """Temporarily use attention outputs [B, T, HQ, D]; gated families compute queries and gate."""
    with contextlib.ExitStack() as stack:
        if family.gated:
            stack.enter_context(replace_attention(attention, lambda *arguments: outputs))
            for projection in (attention.k_proj, attention.v_proj):
                stack.enter_context(replace_forward(projection, partial(_zeros, projection)))
        else:
            project = partial(_project, getattr(attention, family.output), outputs)
            stack.enter_context(replace_forward(attention, project))
        yield


def _project(projection: nn.Module, outputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    return projection(outputs.flatten(2)), None
