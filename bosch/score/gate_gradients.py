"""Derivative of the answers' log-likelihood by each KV head's gate, from one backward pass.

Gates in [0, 1] blend a KV head's attention outputs: g full + (1 - g) sliding with one window. With
several windows each choice except the narrowest window has a gate, and the narrowest has the weight
1 - sum of the gates. A head mask has gates of 0 and 1. The derivative by all gates costs one
forward and one backward pass, as much as evaluating a few masks. L layers, HKV key/value heads, K
windows of the menu.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.hybrid import Attend, AttentionCall, HeadLayout, compute_attention
from bosch.masks import HeadMask
from bosch.model.interface import attention_modules
from bosch.score.answers import answer_logits
from bosch.score.batches import Batch, final_states
from bosch.score.patching import freeze, recompute_layers, replace_attention
from bosch.window import Window


def gate_gradients(
    model: PreTrainedModel,
    batch: Batch,
    mask: HeadMask,
    menu: Sequence[Window],
    *,
    recompute: bool = False,
) -> Tensor:
    """Gradient [L, HKV, K] of the answers' summed log-probability, on the CPU as float64.

    It is computed in the model's dtype. Entry 0 is for full attention, entry k for window k - 1 of
    the `menu`, the widest first; the narrowest has no gate. The model is in search mode.
    Parameters get no gradient. With `recompute` the backward pass recomputes each layer instead of
    storing its activations, with bit-identical results.
    """
    device = model.device
    chosen = choices_of(mask, menu).to(device)[..., None]
    gates = (chosen == torch.arange(len(menu), device=device)).float().requires_grad_()
    layouts = [
        HeadLayout.of([size] * mask.shape[1], menu[0].sinks)
        for size in (0, *(window.size for window in menu))
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(freeze(model))
        for module, gate in zip(attention_modules(model), gates.unbind(), strict=True):
            blend = blended_attention(gate, layouts)
            stack.enter_context(replace_attention(module, blend))
        if recompute:
            stack.enter_context(recompute_layers(model))
        stack.enter_context(torch.enable_grad())
        hidden = final_states(model.get_decoder(), batch.input_ids, device)
        rows, columns = batch.rows.to(hidden.device), batch.columns.to(hidden.device)
        logits = answer_logits(model, hidden[rows, columns])
        answers = batch.answers.to(logits.device)[:, None]
        log_probabilities = torch.log_softmax(logits, dim=-1).gather(1, answers)
        (gradient,) = torch.autograd.grad(log_probabilities.sum(), gates)
    return gradient.double().cpu()


def choices_of(mask: HeadMask, menu: Sequence[Window]) -> Tensor:
    """The number of each head's window in the menu, from 1; 0 for full heads; [L, HKV]."""
    number = {0: 0} | {window.size: k for k, window in enumerate(menu, 1)}
    return torch.tensor([[number[size] for size in row] for row in mask.windows])


def blended_attention(gates: Tensor, layouts: Sequence[HeadLayout]) -> Attend:
    """Attention of all layouts weighted by `gates` [HKV, K], of the last one by 1 - their sum."""

    def attend(module: nn.Module, call: AttentionCall) -> Tensor:
        *others, narrowest = (compute_attention(call._replace(layout=layout)) for layout in layouts)
        shares = gates.repeat_interleave(call.query.shape[1] // len(gates), dim=0)
        shares = shares.to(narrowest)
        blended = narrowest
        for share, output in zip(shares.unbind(1), others, strict=True):
            blended = blended + share[:, None] * (output - narrowest)
        return blended

    return attend
