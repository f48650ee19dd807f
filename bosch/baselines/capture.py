"""What a static ranking reads: every layer's queries, keys and values, one example at a time.

The model runs with full attention under an attention function of its own, which shows each layer's
queries and keys as the softmax sees them, after norms and rotary embedding, whatever the family.
Shapes: T tokens, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bosch.calibration import CalibrationExample
from bosch.families import check_searchable
from bosch.layer_control import frozen, replaced
from bosch.modeling import attention_modules
from bosch.sharding import gather_heads

_NAME = "bosch_capture"
_VISIT = "bosch_visit"
_GATHER = "bosch_gather"


@dataclass(frozen=True)
class LayerStates:
    """One layer on one example: query [HQ, T, D], key and value [HKV, T, D], detached.

    `output_gradient` [HQ, T, D] is dL/dO, where O is the attention output before the output
    projection; None in a pass without gradients.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    output_gradient: Tensor | None = None


Visit = Callable[[int, LayerStates], None]


def visit_layers(model: Any, input_ids: Tensor, visit: Visit) -> None:
    """Run one example [T] and show each layer's states to `visit(layer, states)`.

    Raises UserError when the family is not supported or has no full attention.
    """
    with torch.inference_mode(), _captured(model, visit):
        model.get_decoder()(input_ids=input_ids[None].to(model.device), use_cache=False)


def visit_gradients(model: Any, example: CalibrationExample, visit: Visit) -> None:
    """As `visit_layers`, with the gradient of the cross-entropy at each layer's attention output.

    The loss is the mean over the answer tokens. Layers are recomputed in the backward pass, so
    that kept activations do not grow with the width of the feed-forward part. No parameter gets a
    gradient. Raises as `visit_layers`.
    """
    ids = torch.tensor(example.input_ids, device=model.device)
    answer = ids[-example.answer_length :]
    with contextlib.ExitStack() as stack:
        stack.enter_context(frozen(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_captured(model, visit))
        # Only the layers' inputs are kept for the backward pass. Hooks set while a layer is
        # recomputed never fire: the backward pass follows the first graph.
        for layer in model.get_decoder().layers:
            stack.enter_context(replaced(layer, _checkpointed(layer.forward)))
        embedded = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
        kept = example.answer_length + 1  # no logits are made where nothing is asked
        output = model(inputs_embeds=embedded, use_cache=False, logits_to_keep=kept)
        logits = output.logits[0, :-1].float()
        functional.cross_entropy(logits, answer.to(logits.device)).backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _captured(model: Any, visit: Visit) -> Iterator[None]:
    check_searchable(model.config)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)
    before = model.config._attn_implementation
    modules = attention_modules(model)
    model.set_attn_implementation(_NAME)
    try:
        for layer, module in enumerate(modules):
            setattr(module, _VISIT, _bound(visit, layer))
            setattr(module, _GATHER, partial(gather_heads, model))
        yield
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            module.__dict__.pop(_VISIT, None)
            module.__dict__.pop(_GATHER, None)


def _bound(visit: Visit, layer: int) -> Callable[[LayerStates], None]:
    return lambda states: visit(layer, states)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """One example without padding needs no mask beyond the causal one."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: full causal attention [1, T, HQ, D] that shows itself."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    visit: Callable[[LayerStates], None] = getattr(module, _VISIT)
    gather: Callable[[Tensor], Tensor] = getattr(module, _GATHER)
    queries, keys, values = (gather(part.detach())[0] for part in (query, key, value))
    if out.requires_grad:

        def show(gradient: Tensor) -> None:
            visit(LayerStates(queries, keys, values, scale, gather(gradient.detach())[0]))

        out.register_hook(show)  # type: ignore[no-untyped-call]
    else:
        visit(LayerStates(queries, keys, values, scale))
    return out.transpose(1, 2).contiguous(), None


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
