"""Hybrid attention: backends against loops that share no code with them, and common properties.

Also with capped logits and with logits of heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch import hybrid
from bosch.attention import fastest_backend, hybrid_attention
from bosch.backends import BACKENDS
from bosch.hybrid import AttentionContext, HeadLayout, fused_attention, pass_context
from bosch.model.families import attention_needs
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.attention_case import Case, by_rows, cases, full_first
from tests.hybrid_case import mask_of, small_model
from tests.plain_attention import plain_attention

_NEAR = {"rtol": 1e-9, "atol": 1e-9}


def _expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs computed by loops, [B, T, HQ, D], and which queries are not padding, [B, T]."""
    context, total = case.context(), case.past + case.length
    valid = np.ones((case.batch, total), bool) if context.valid is None else context.valid.numpy()
    document = np.zeros_like(valid, int)
    if context.document is not None:
        document = context.document.numpy()
    states = [x.detach().numpy() for x in case.tensors()]
    windows = [None if window is None else (window.size, window.sinks) for window in case.windows()]
    output = plain_attention(*states, windows, valid, document)
    return torch.from_numpy(output), torch.from_numpy(valid[:, case.past :])


@settings(max_examples=40, deadline=None)
@given(case=cases(), backend=st.sampled_from(["eager", "sdpa"]))
def test_backends_equal_plain_loops(case: Case, backend: str) -> None:
    """With sinks, padding of every kind, packed documents and a past."""
    case = replace(case, batch=1) if case.length > 40 else case
    expected, real = _expected(case)
    if backend == "eager":
        real = torch.ones_like(real)  # also padding, which sees itself and what is before it
    output = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend=backend)
    torch.testing.assert_close(output.detach()[real], expected[real], **_NEAR)


def test_layers_on_another_device_have_their_own_masks() -> None:
    """If a model is split over devices, its layers share the context of a pass."""
    here, there = torch.device("cpu"), torch.device("meta")
    length = 6
    context = AttentionContext(length, valid=torch.arange(length)[None] > 2, start=torch.tensor(0))
    query = torch.randn(1, 4, length, 8)
    assert pass_context(context, query, query) is context
    assert context.sink_slots(2, here).tolist() == [[3, 4]]
    other = pass_context(context, query.to(there), query.to(there))
    assert other is context.on(there) is other.on(there) and context.on(here) is context
    assert other.sink_slots(2, there).device == other.rank(there).device == there
    assert other.valid is not None and other.start is not None
    assert other.valid.device == other.start.device == there
    assert context.sink_slots(2, here).device == here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_search_and_deploy_layouts_agree(dtype: torch.dtype) -> None:
    rows = (False, True, False, True)
    case = Case(70, 16, 2, rows, batch=2, padding="left")
    query, key, value = (x.to(dtype) for x in case.tensors())
    searched = hybrid_attention(query, key, value, case.layout(), case.context())
    order = torch.tensor([1, 3, 0, 2])
    query_order = (order[:, None] * 2 + torch.arange(2)).reshape(-1)
    deployed = hybrid_attention(
        query[:, query_order], key[:, order], value[:, order],
        full_first(2, 4, Window(16, 2)), case.context(),
    )  # fmt: skip
    assert torch.equal(searched[:, :, query_order], deployed)


def test_bfloat16_is_nearly_as_precise_as_eager() -> None:
    case = Case(200, 16, 0, (True, False))
    exact = hybrid_attention(*case.tensors(), case.layout(), backend="eager")
    low = case.tensors(torch.bfloat16)
    errors = [
        (hybrid_attention(*low, case.layout(), backend=name) - exact).abs().max().item()
        for name in ("eager", "sdpa")
    ]
    assert errors[1] <= 2 * errors[0] + 1e-3


def test_a_large_chunk_with_a_past_needs_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(300, 16, 2, (True, False), past=200)
    expected = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend="eager")
    monkeypatch.setattr(hybrid, "DENSE_MASK_ENTRIES", 40_000)
    result = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend="sdpa")
    torch.testing.assert_close(result, expected)


def test_masks_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = Mock(side_effect=AttentionContext.visible, autospec=True)
    monkeypatch.setattr(AttentionContext, "visible", lambda self, *args: visible(self, *args))
    case = Case(40, 8, 3, (True, False), padding="left", batch=2)
    context, calls = case.context(), []
    for _ in range(3):
        hybrid_attention(*case.tensors(), case.layout(), context)
        calls.append(visible.call_count)
    assert calls[0] == calls[2] > 0


def test_inconsistent_numbers_of_heads_are_refused() -> None:
    query, key, value = Case(5, 4, 0, (True, False)).tensors()
    with pytest.raises(ValueError, match="3 KV heads"):
        hybrid_attention(query, key, value, full_first(1, 3, Window(4)))


@pytest.mark.parametrize("masked", [False, True])
def test_keys_are_repeated_if_a_gpus_kernels_do_not_share_them(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the same values, and no grouped heads with masks."""
    query, key, value = Case(64, 8, 0, (True, True), q_per_kv=3, batch=2).tensors()
    mask = torch.rand(2, 1, 64, 64).gt(0.3) | torch.eye(64, dtype=torch.bool) if masked else None
    options: dict[str, Any] = {"scale": 0.3, "mask": mask, "is_causal": not masked}
    expected = fused_attention(query, key, value, **options)
    attend = Mock(side_effect=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(hybrid, "is_gpu", lambda states: True)
    monkeypatch.setattr(hybrid, "can_use_flash_attention", lambda arguments: not masked)
    monkeypatch.setattr(hybrid.F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(fused_attention(query, key, value, **options), expected)
    assert attend.call_args.kwargs["enable_gqa"] is not masked


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "shares"), [(256, 256, True), (512, 512, False), (64, 32, False)]
)
def test_compiled_heads_share_keys_if_flash_supports_their_dimension(
    key_dim: int, value_dim: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not Gemma 4's 512: grouped, these run only on torch's math kernel, which holds all logits."""
    attend = Mock()
    monkeypatch.setattr(hybrid, "is_gpu", lambda states: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(hybrid.F, "scaled_dot_product_attention", attend)
    shapes = [(1, 6, 8, key_dim), (1, 2, 8, key_dim), (1, 2, 8, value_dim)]
    fused_attention(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), scale=1.0)
    assert attend.call_args.kwargs["enable_gqa"] is shares
    assert all(states.shape[1] == (2 if shares else 6) for states in attend.call_args.args[1:])


def test_the_fastest_backend_is_the_first_with_all_abilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = torch.bfloat16
    assert fastest_backend(half) == ("sdpa" if not torch.cuda.is_available() else "varlen")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("varlen", "flex"):
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(usable=lambda: True))
    assert fastest_backend(half) == "varlen"
    assert fastest_backend(half, sinks=4) == fastest_backend(torch.float32) == "flex"
    assert fastest_backend(half, dropout=0.1) == fastest_backend(half, sinks=4, dropout=0.1)
    assert fastest_backend(half, dropout=0.1) == fastest_backend(half, needs={"softcap"}) == "sdpa"
    assert fastest_backend(half, needs={"head_logits"}) == "flex"
    assert fastest_backend(half, needs={"wide_heads"}) == "sdpa"
    monkeypatch.setitem(BACKENDS, "varlen", BACKENDS["varlen"]._replace(usable=lambda: False))
    assert fastest_backend(half) == "flex"


def test_abilities_that_a_familys_attention_needs() -> None:
    needs = {
        family: set(attention_needs(materialize(model, mask_of(model.config, Window(5))).config))
        for family in ("qwen3", "gemma2", "gpt_oss")
        for model in (small_model(family),)
    }
    assert needs == {"qwen3": set(), "gemma2": {"softcap"}, "gpt_oss": {"head_logits"}}


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
