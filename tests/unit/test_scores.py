"""Capped logits and logits of heads: every backend that supports them equals the definition."""

from __future__ import annotations

import pytest
import torch

from bosch import hybrid
from bosch.attention import hybrid_attention
from bosch.hybrid import AttentionContext, HeadLayout
from bosch.window import Window
from tests.attention_case import by_rows, full_first

HEADS, KV_HEADS, DIM, WINDOW = 6, 3, 8, 20
LAYOUTS = {
    "mixed": by_rows([False, True, False], Window(WINDOW, 2)),
    "deployed": full_first(1, 3, Window(WINDOW)),
    "three windows": HeadLayout.of([31, 9, WINDOW], 2),
    "deployed, two windows": HeadLayout.of([0, 31, 9], 2),
    "all full": full_first(3, 3, Window(WINDOW)),
    "all sliding": full_first(0, 3, Window(WINDOW)),
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
    """The definition, head by head, with the extra logit in the denominator."""
    slots, outputs = torch.arange(query.shape[2]), []
    distance, real = slots[:, None] - slots, torch.tensor(valid)
    first = real.long().cumsum(0) <= layout.sinks
    window_of = {head: group.window for group in layout.groups for head in group.heads}
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        visible = (distance >= 0) & real
        window = window_of[group]
        if window is not None:
            visible = visible & ((distance < window.size) | first)
        visible = visible | (distance == 0)
        scores = query[:, head] @ key[:, group].transpose(1, 2) * 0.7
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        powers = torch.exp(scores) * visible
        total = powers.sum(-1, keepdim=True)
        if logits is not None:
            total = total + torch.exp(logits[head])
        outputs.append(powers / total @ value[:, group])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("backend", "capped", "joined"),
    [
        *((name, *kinds) for name in ("eager", "sdpa") for kinds in ((True, False), (True, True))),
        *((name, False, True) for name in ("eager", "sdpa", "flex")),
    ],
)
def test_outputs_and_gradients_equal_the_definition(
    backend: str, layout: HeadLayout, capped: bool, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "DENSE_MASK_ENTRIES", 5_000)  # a few queries at a time
    for length, padding in ((WINDOW + 1, 0), (70, 0), (70, 5)):
        *tensors, logits = _tensors(length)
        cap, extra = 1.5 if capped else None, logits if joined else None
        valid = [False] * padding + [True] * (length - padding)
        context = AttentionContext(length, 0, torch.tensor([valid, valid]) if padding else None)
        options = {"scaling": 0.7, "softcap": cap, "head_logits": extra, "backend": backend}
        result = hybrid_attention(*tensors, layout, context, **options)
        expected = _written_down(*tensors, extra, cap, layout, valid)
        torch.testing.assert_close(result[:, padding:], expected[:, padding:])
        plain = hybrid_attention(*tensors, layout, context, scaling=0.7, backend=backend)
        assert (plain - result).abs().max() > 0.05
        sources = [*tensors, logits] if joined else tensors
        weights = torch.randn_like(expected)[:, padding:]
        gradients = [
            torch.autograd.grad((out[:, padding:] * weights).sum(), sources)
            for out in (result, expected)
        ]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right)
