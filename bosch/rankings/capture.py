"""Queries, keys and values of all layers for the static rankings, one example at a time.

The model runs with every head full; queries and keys are those that enter the softmax, after norms
and RoPE. Shapes: T tokens, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from bosch.hybrid import AttentionCall, LogitTransform, compute_attention, fused_attention
from bosch.masks import HeadMask
from bosch.model.families import check_family, text_config
from bosch.model.interface import attention_modules
from bosch.model.search_mode import head_mask, mask_shape
from bosch.score.calibration import CalibrationExample, CalibrationSet
from bosch.score.patching import freeze, recompute_layers, replace_attention


@dataclass(frozen=True)
class LayerStates:
    """One layer on one example: query [HQ, T, D], key and value [HKV, T, D], detached.

    `output_gradient` [HQ, T, D] is dL/dO, with O the attention output before its projection; None
    without gradients. `transform`: that of full heads, with all HQ `head_logits`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    transform: LogitTransform
    output_gradient: Tensor | None = None


Visit = Callable[[int, LayerStates], None]


def query_heads(model: PreTrainedModel) -> int:
    """HQ: query heads of a layer with full attention."""
    return text_config(model.config).num_attention_heads


def visit_layers(model: PreTrainedModel, input_ids: Tensor, visit: Visit) -> None:
    """Call `visit(layer, states)` for each layer of a pass over [T]; UserError if unsupported."""
    with torch.inference_mode(), _captured(model, visit):
        model.get_decoder()(input_ids=input_ids[None].to(model.device), use_cache=False)


def visit_gradients(model: PreTrainedModel, example: CalibrationExample, visit: Visit) -> None:
    """As `visit_layers`, with the gradient of the cross-entropy at each layer's attention output.

    The loss is the mean over the answer tokens. Layers are recomputed backward, so that memory does
    not grow with the MLP's width. No parameter gets a gradient. Raises as `visit_layers` does.
    """
    ids = torch.tensor(example.input_ids, device=model.device)
    answer = ids[-example.answer_length :]
    with contextlib.ExitStack() as stack:
        stack.enter_context(freeze(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_captured(model, visit))
        # Hooks set during recomputation never fire: backward uses the first graph.
        stack.enter_context(recompute_layers(model))
        # Not inputs_embeds: Gemma 4 would search its vocabulary for each row.
        hook = model.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, embedded: embedded.detach().requires_grad_()
        )
        stack.callback(hook.remove)
        answer_rows = example.answer_length + 1  # no logits for the prompt
        output = model(input_ids=ids[None], use_cache=False, logits_to_keep=answer_rows)
        logits = output.logits[0, :-1].float()
        functional.cross_entropy(logits, answer.to(logits.device)).backward()


def summed_terms(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    terms_of: Callable[[LayerStates], Iterable[Tensor]],
    *,
    by_gradient: bool = False,
) -> Tensor:
    """Sums of float64 terms [HQ, ...] over blocks and examples, for each layer: [L, HQ, ...].

    With `by_gradient` the states have the gradient from `visit_gradients`.
    """
    layers, _ = mask_shape(model.config)
    sums = [torch.zeros((), dtype=torch.float64)] * layers

    def add(layer: int, states: LayerStates) -> None:
        sums[layer] = sums[layer] + torch.stack(list(terms_of(states))).sum(dim=0).cpu()

    for example in calibration.examples:
        if by_gradient:
            visit_gradients(model, example, add)
        else:
            visit_layers(model, torch.tensor(example.input_ids), add)
    return torch.stack(sums)


@contextlib.contextmanager
def _captured(model: PreTrainedModel, visit: Visit) -> Iterator[None]:
    check_family(model.config)  # raises for families that are not supported
    full = HeadMask.all_full(*mask_shape(model.config))
    with contextlib.ExitStack() as stack:
        stack.enter_context(head_mask(model, full))
        for layer, module in enumerate(attention_modules(model)):
            show = partial(visit, layer)
            stack.enter_context(replace_attention(module, partial(_attend, show)))
        yield


def _attend(show: Callable[[LayerStates], None], module: nn.Module, call: AttentionCall) -> Tensor:
    """Full causal attention of one example, [1, T, HQ, D]; passes its states to `show`."""
    assert isinstance(call.key, Tensor) and isinstance(call.value, Tensor)
    states, (group,) = (call.query, call.key, call.value), call.layout.groups
    transform = call.transform.of(call.layout, group, call.query.shape[1] // call.key.shape[1])
    if transform.head_logits is not None:
        transform = replace(transform, head_logits=transform.head_logits.detach())
    if transform.is_plain:
        out = fused_attention(*states, is_causal=True, scale=transform.scaling).transpose(1, 2)
    else:
        out = compute_attention(call._replace(backend="sdpa"))
    queries, keys, values = (x.detach()[0] for x in states)
    if out.requires_grad:

        def show_gradient(gradient: Tensor) -> None:
            by_head = gradient.detach().transpose(1, 2)[0]
            show(LayerStates(queries, keys, values, transform, by_head))

        out.register_hook(show_gradient)
    else:
        show(LayerStates(queries, keys, values, transform))
    return out.contiguous()
