"""An extra logit per head in the softmax of a fused kernel, from the kernel's log-sum-exp.

For scores s with lse = log sum exp(s), a logit b makes the weights exp(s) / (exp(b) + exp(lse)):
the kernel's output times sigmoid(lse - b). With lse' = log(exp(b) + exp(lse)) these weights are
exp(s - lse'). So the kernel's backward pass, with the scaled output and lse' in place of its own,
gives the gradients of queries, keys and values. The gradient of b is -sum_t p_t (dO_t . O_t), where
p = exp(b - lse') is the share of b and O the scaled output. Shapes: T queries, H query heads, D
head dimension, with or without a batch before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SoftmaxKernel(NamedTuple):
    """A fused attention kernel with its options.

    `forward` maps query, key and value to the output and the log-sum-exp [..., H, T]; `backward`
    maps the output's gradient, query, key, value, output and log-sum-exp to the gradients of query,
    key and value. The output is [..., H, T, D], or [..., T, H, D] without `heads_first`.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    heads_first: bool = True


def with_head_logits(
    kernel: SoftmaxKernel, query: Tensor, key: Tensor, value: Tensor, logits: Tensor
) -> Tensor:
    """The kernel's attention with extra `logits` [H / n]; n rows may be flattened into heads."""
    heads = query.shape[-3 if kernel.heads_first else -2]
    logits = logits.repeat(heads // len(logits))
    apply: Any = _WithLogits.apply
    return apply(kernel, query, key, value, logits)


class _WithLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: SoftmaxKernel, query: Tensor, key: Tensor, value: Tensor, logits: Tensor
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        total = torch.logaddexp(lse, logits.to(lse.dtype)[:, None])
        share = torch.exp(lse - total)
        share = (share if kernel.heads_first else share.transpose(-1, -2))[..., None]
        scaled: Tensor = (out * share).to(query.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, logits, scaled, total)
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernel: SoftmaxKernel = ctx.kernel
        query, key, value, logits, out, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        state_grads = kernel.backward(gradient, query, key, value, out, total)
        logit_grads = None
        if ctx.needs_input_grad[4]:
            shares = torch.exp(logits.to(total.dtype)[:, None] - total)
            products = (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1)
            if not kernel.heads_first:
                products = products.transpose(-1, -2)
            logit_grads = -(shares * products).sum(-1)
            logit_grads = logit_grads.reshape(-1, len(logits)).sum(0).to(logits.dtype)
        return None, *state_grads, logit_grads
