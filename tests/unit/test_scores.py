"""Capped scores and logits of heads: every backend that has them computes what is written down."""

from __future__ import annotations

import pytest
import torch

from bosch.attention import HeadLayout, Span, causal, hybrid_attention
from bosch.errors import UserError

HEADS, KV_HEADS, DIM, WINDOW = 6, 3, 8, 20
LAYOUTS = {
    "mixed": HeadLayout.search([False, True, False], WINDOW, 2),
    "deployed": HeadLayout.deploy(1, 3, WINDOW),
    "all full": HeadLayout.deploy(3, 3, WINDOW),
    "all sliding": HeadLayout.deploy(0, 3, WINDOW),
}


def _tensors(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, length, DIM), (2, KV_HEADS, length, DIM), (2, KV_HEADS, length, DIM)]
    drawn = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in (*shapes, (HEADS,))]
    return [tensor.requires_grad_() for tensor in drawn]


def _written_down(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: torch.Tensor | None,
    softcap: float | None, layout: HeadLayout, valid: list[bool],
) -> torch.Tensor:  # fmt: skip
    """Head by head, with the logit in the denominator."""
    slots, outputs = torch.arange(query.shape[2]), []
    distance, real = slots[:, None] - slots, torch.tensor(valid)
    first = real.long().cumsum(0) <= layout.sinks
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        seen = (distance >= 0) & real
        if group in layout.sliding:
            seen = seen & ((distance < layout.window_size) | first)
        seen = seen | (distance == 0)
        scores = query[:, head] @ key[:, group].transpose(1, 2) * 0.7
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        powers = torch.exp(scores) * seen
        total = powers.sum(-1, keepdim=True)
        if logits is not None:
            total = total + torch.exp(logits[head])
        outputs.append(powers / total @ value[:, group])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("capped", "joined"), [(True, False), (False, True), (True, True)])
def test_outputs_and_gradients_are_what_is_written_down(
    backend: str, layout: HeadLayout, capped: bool, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "_DENSE_MASK_ENTRIES", 5_000)  # some queries at a time
    for length, padding in ((WINDOW + 1, 0), (70, 0), (70, 5)):
        *tensors, logits = _tensors(length)
        cap, extra = 1.5 if capped else None, logits if joined else None
        valid = [False] * padding + [True] * (length - padding)
        span = Span(length, 0, torch.tensor([valid, valid]) if padding else None)
        options = {"scaling": 0.7, "softcap": cap, "head_logits": extra, "backend": backend}
        found = hybrid_attention(*tensors, layout, span, **options)
        wanted = _written_down(*tensors, extra, cap, layout, valid)
        torch.testing.assert_close(found[:, padding:], wanted[:, padding:])
        plain = hybrid_attention(*tensors, layout, span, scaling=0.7, backend=backend)
        assert (plain - found).abs().max() > 0.05
        sources = [*tensors, logits] if joined else tensors
        weights = torch.randn_like(wanted)[:, padding:]
        gradients = [
            torch.autograd.grad((out[:, padding:] * weights).sum(), sources)
            for out in (found, wanted)
        ]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_backends_without_them_refuse(backend: str) -> None:
    *tensors, logits = _tensors(8)
    with pytest.raises(UserError, match=f"the {backend} backend caps no attention scores"):
        hybrid_attention(*tensors, LAYOUTS["deployed"], head_logits=logits, backend=backend)
