"""The training loss without the logits matrix: the output head runs over chunks of tokens.

N tokens of a micro-batch, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bosch.model.families import logit_scale
from bosch.parallel.context import ContextParallel
from bosch.score.answers import scaled_logits
from stages.train.memory import chunk_tokens

IGNORED = -100  # label of a position that is not predicted

# Sum over the tokens of a slice of [0, N), from their logits [n, V] in float32.
ChunkLoss = Callable[[Tensor, slice], Tensor]
# Sum over all tokens, from the output head and its inputs [N, C].
HeadLoss = Callable[[Any, Tensor], Tensor]
# A micro-batch's loss from the config, ids, next tokens or IGNORED, and positions, [B, T] each.
BatchLoss = Callable[[Any, Tensor, Tensor, Tensor | None], HeadLoss]


class _ChunkedHead(torch.autograd.Function):
    """Sum of a loss over all tokens; gradients are computed chunk by chunk in the forward pass.

    Between forward and backward only the gradients [N, C] and [V, C] are kept, no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        config: Any,
        chunk: int,
        chunk_loss: ChunkLoss,
    ) -> Tensor:
        device = states.device.type
        dtype = states.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        leaves = [weight, *([] if bias is None else [bias])]
        needs_grad = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1 : 1 + len(leaves)]]
        cast_leaves = [
            leaf.detach().to(dtype).requires_grad_(leaf.requires_grad) for leaf in leaves
        ]
        # Sums over chunks in float32: bf16 would lose small terms.
        sums: list[Any] = [
            torch.zeros_like(leaf, dtype=torch.float32) if leaf.requires_grad else None
            for leaf in leaves
        ]
        state_gradient = torch.empty_like(states) if needs_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for first in range(0, len(states), chunk):
            rows = slice(first, first + chunk)
            with torch.enable_grad(), torch.autocast(device, enabled=False):
                chunk_states = states[rows].detach().to(dtype).requires_grad_(needs_grad[0])
                logits = chunk_states @ cast_leaves[0].t()
                if bias is not None:
                    logits = logits + cast_leaves[1]
                loss = chunk_loss(scaled_logits(config, logits.float()), rows)
                del logits
            total += loss.detach()
            inputs = [chunk_states, *cast_leaves]
            indices = [index for index, needed in enumerate(needs_grad) if needed]
            if not indices:
                continue
            gradients = torch.autograd.grad(loss, [inputs[index] for index in indices])
            for index, gradient in zip(indices, gradients, strict=True):
                if index == 0:
                    assert state_gradient is not None
                    state_gradient[rows] = gradient
                else:
                    sums[index - 1].add_(gradient)
        ctx.gradients = [
            state_gradient,
            *(
                None if gradient is None else gradient.to(leaf.dtype)
                for gradient, leaf in zip(sums, leaves, strict=True)
            ),
        ]
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = [None if grad is None else grad.mul_(factor) for grad in ctx.gradients]
        del ctx.gradients
        gradients += [None] * (3 - len(gradients))
        return (*gradients, None, None, None)


def head_loss(
    head: Any, states: Tensor, config: Any, chunk_loss: ChunkLoss, chunk: int | None = None
) -> Tensor:
    """Sum of `chunk_loss` over the logits of `states` [N, C], at most `chunk` tokens at a time."""
    if chunk is None:
        chunk = chunk_tokens(head.weight.shape[0])
    inputs = [states, head.weight, getattr(head, "bias", None)]
    if not torch.is_grad_enabled():  # needs_input_grad is set even under no_grad
        inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
    return _ChunkedHead.apply(*inputs, config, chunk, chunk_loss)


def cross_entropy(labels: Tensor) -> ChunkLoss:
    """Cross-entropy in nats for `labels` [N] without the `IGNORED` ones."""

    def chunk_loss(logits: Tensor, rows: slice) -> Tensor:
        return nn.functional.cross_entropy(
            logits, labels[rows], ignore_index=IGNORED, reduction="sum"
        )

    return chunk_loss


def counting_wrong(labels: Tensor, wrong: Tensor) -> ChunkLoss:
    """`cross_entropy` that adds the number of `labels` that are not the likeliest token."""

    def chunk_loss(logits: Tensor, rows: slice) -> Tensor:
        predicted = labels[rows] != IGNORED
        wrong.add_(((logits.argmax(-1) != labels[rows]) & predicted).sum())
        return cross_entropy(labels)(logits, rows)

    return chunk_loss


def liger_cross_entropy(head: Any, states: Tensor, labels: Tensor, config: Any) -> Tensor:
    """The sum of the cross-entropy by Liger's fused kernel."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result: Any = liger_fused_linear_cross_entropy(
        states,
        head.weight,
        labels,
        bias=getattr(head, "bias", None),
        ignore_index=IGNORED,
        reduction="sum",
        softcap=logit_scale(config).cap,
        # By default Liger sums the head's gradient in the weight's precision, bf16 under FSDP.
        accum_dtype=torch.float32,
    )
    return result[0] if isinstance(result, tuple) else getattr(result, "loss", result)


def install_loss(
    model: Any,
    *,
    liger: bool = False,
    distillation: BatchLoss | None = None,
    context_parallel: ContextParallel | None = None,
) -> None:
    """Make `model` return only its loss, from a forward pass without cache and without logits.

    The head computes the loss in its forward pass, so that FSDP and DeepSpeed gather its weight as
    for any module. With `liger` its kernel computes the loss, except for scaled logits (Cohere,
    Granite) and `distillation`, for which it is computed in chunks.

    With `count_wrong` the pass computes the cross-entropy, and returns the number of labels that
    are not the likeliest token beside it.

    With `context_parallel` it takes whole sequences and computes this process's tokens; the loss is
    their part of the sum.
    """
    config = model.config
    scale = logit_scale(config)
    has_scaled_logits = any(number not in (None, 1.0) for number in (scale.factor, scale.divisor))
    uses_liger = liger and not has_scaled_logits

    def head_forward(self: Any, states: Tensor, loss_of: HeadLoss) -> Tensor:
        return loss_of(self, states.flatten(0, 1))

    def forward(
        self: Any,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        num_items_in_batch: int | None = None,
        count_wrong: bool = False,
    ) -> dict[str, Tensor]:
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # The loss is 0 if nothing is predicted.
        count = num_items_in_batch or int((targets != IGNORED).sum()) or 1
        if context_parallel is not None:
            rows, length = targets.shape
            position_ids = context_parallel.begin(rows, length, position_ids, targets.device)
            input_ids, targets = (context_parallel.local(ids) for ids in (input_ids, targets))
        flat_targets = targets.flatten()
        wrong = torch.zeros((), device=targets.device)
        loss_of: HeadLoss
        if count_wrong:
            chunk_loss = counting_wrong(flat_targets, wrong)
            loss_of = partial(head_loss, config=config, chunk_loss=chunk_loss)
        elif distillation is not None:
            loss_of = distillation(config, input_ids, targets, position_ids)
        elif uses_liger:
            loss_of = partial(liger_cross_entropy, labels=flat_targets, config=config)
        else:
            loss_of = partial(head_loss, config=config, chunk_loss=cross_entropy(flat_targets))
        decoder = self.get_decoder()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        loss = self.get_output_embeddings()(output.last_hidden_state, loss_of)
        return {"loss": loss / count, **({"wrong": wrong} if count_wrong else {})}

    head = model.get_output_embeddings()
    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(forward, model)
