"""Other forwards in place of a decoder's own, and weights at rest, for the length of one pass.

B batch, T tokens, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from bosch.attention import Span
from bosch.interface import Attend, HeadState, head_state, set_head_state

Step = Callable[[int, Callable[..., Tensor], Tensor, dict[str, Any]], Tensor]


@contextlib.contextmanager
def controlled(layers: list[nn.Module], step: Step) -> Iterator[None]:
    """Let `step` decide what each layer's forward does."""
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):

            def forward(
                hidden_states: Tensor,
                *,
                _number: int = number,
                _own: Any = layer.forward,
                **kw: Any,
            ) -> Tensor:
                return step(_number, _own, hidden_states, kw)

            stack.enter_context(replaced(layer, forward))
        yield


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a while; one that was set on the module before comes back."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of `model` asks for a gradient for a while."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def attending(module: nn.Module, attend: Attend) -> Iterator[None]:
    """Another attention function for one layer, for a while."""
    state = head_state(module)
    assert state is not None
    set_head_state(module, HeadState(state.layout, state.backend, attend))
    try:
        yield
    finally:
        set_head_state(module, state)


class _KeysAndValues(Exception):
    """Ends a layer's forward as soon as its keys and values are known."""


def keys_and_values(
    attention: Any, forward: Callable[..., Tensor], state: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, HKV, T, D] of a layer, as its attention gets them."""
    found: list[Tensor] = []

    def attend(
        module: nn.Module, query: Tensor, key: Any, value: Any, span: Span | None, scale: float
    ) -> Tensor:
        found.extend((key, value))
        raise _KeysAndValues

    with contextlib.ExitStack() as stack:
        stack.enter_context(attending(attention, attend))
        if hasattr(attention, "q_proj"):
            stack.enter_context(replaced(attention.q_proj, partial(_nothing, attention.q_proj)))
        with contextlib.suppress(_KeysAndValues):
            forward(state, **kwargs)
    key, value = found
    return key, value


def _nothing(projection: nn.Linear, hidden: Tensor) -> Tensor:
    """In place of queries that nobody reads."""
    return hidden.new_zeros(*hidden.shape[:-1], projection.out_features)


def projected(attention: Any, mixed: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """In place of an attention module: its output projection of known attention outputs."""
    return attention.o_proj(mixed.flatten(2)), None
