"""Hybrid attention: backends against loops that share no code with them, and common properties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from bosch import hybrid
from bosch.attention import fastest_backend, hybrid_attention
from bosch.backends import BACKENDS, lacking
from bosch.hybrid import (
    FUSED_KERNELS,
    AttentionContext,
    HeadLayout,
    fused_attention,
    pass_context,
)
from bosch.model.families import attention_needs
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.attention_case import Case, cases, full_first
from tests.hybrid_case import mask_of, small_model
from tests.plain_attention import plain_attention

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_layout_that_was_used_equals_one_that_was_not() -> None:
    """As a cache compares its own with the model's after a mask is applied again."""
    used, new = (HeadLayout.of([0, 4, 0]) for _ in range(2))
    states = torch.randn(1, 3, 5, 8)
    outputs = [used.heads_of(states, group) for group in used.groups]
    assert torch.equal(used.merge(outputs, 1), states.transpose(1, 2))
    assert used == new and hash(used) == hash(new)


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
    calls: list[Any] = []
    visible = AttentionContext.visible

    def counted(self: AttentionContext, *args: Any) -> torch.Tensor:
        calls.append(args)
        return visible(self, *args)

    monkeypatch.setattr(AttentionContext, "visible", counted)
    case = Case(40, 8, 3, (True, False), padding="left", batch=2)
    context, first = case.context(), 0
    for _ in range(3):
        hybrid_attention(*case.tensors(), case.layout(), context)
        first = first or len(calls)
    assert len(calls) == first > 0


def test_inconsistent_numbers_of_heads_are_refused() -> None:
    query, key, value = Case(5, 4, 0, (True, False)).tensors()
    with pytest.raises(ValueError, match="3 KV heads"):
        hybrid_attention(query, key, value, full_first(1, 3, Window(4)))


def test_a_missing_ability_is_named_with_the_backends_that_have_it() -> None:
    for name, entry in BACKENDS.items():
        for ability in entry.lacks:
            (sentence,) = lacking(name, {ability: "somebody asks"})
            assert sentence.startswith(name) and ", somebody asks; choose sdpa" in sentence
    assert lacking("auto", {"sinks": "x"}) == lacking("sdpa", {"sinks": "x"}) == []
    (sentence, _) = lacking("varlen", {"sinks": "x", "softcap": "y"})
    assert sentence.startswith("varlen has no sinks, x; choose sdpa")


def test_only_one_place_calls_torchs_attention() -> None:
    callers = [
        path.relative_to(ROOT).as_posix()
        for package in ("bosch", "stages", "pipeline", "data_prep")
        for path in (ROOT / package).rglob("*.py")
        if ".scaled_dot_product_attention(" in path.read_text(encoding="utf-8")
    ]
    assert callers == ["bosch/hybrid.py"]
    assert SDPBackend.MATH not in FUSED_KERNELS


def states(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 6, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
def test_keys_are_repeated_if_a_gpus_kernels_do_not_share_them(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: same values, no grouped heads with masks, no math kernel with many heads."""
    query, key, value = states(64, 64, torch.float32)
    mask = torch.rand(2, 1, 64, 64).gt(0.3) | torch.eye(64, dtype=torch.bool) if masked else None
    expected = fused_attention(query, key, value, scale=0.3, mask=mask, is_causal=not masked)
    calls: list[dict[str, Any]] = []
    entered: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return attend(*args, **options)

    def allowed(backends: list[SDPBackend]) -> Any:
        entered.append(backends)
        return torch.no_grad()

    monkeypatch.setattr(hybrid, "is_gpu", lambda states: True)
    monkeypatch.setattr(hybrid, "can_use_flash_attention", lambda arguments: not masked)
    monkeypatch.setattr(hybrid, "SMALL_LOGITS", 100)
    monkeypatch.setattr(hybrid, "sdpa_kernel", allowed)
    monkeypatch.setattr(hybrid.F, "scaled_dot_product_attention", noted)
    result = fused_attention(query, key, value, scale=0.3, mask=mask, is_causal=not masked)
    torch.testing.assert_close(result, expected)
    assert [call["enable_gqa"] for call in calls] == [not masked]
    assert entered == [FUSED_KERNELS]


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "shares"), [(256, 256, True), (512, 512, False), (64, 32, False)]
)
def test_compiled_heads_share_keys_if_flash_supports_their_dimension(
    key_dim: int, value_dim: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not Gemma 4's 512: grouped, these run only on torch's math kernel, which holds all logits."""
    calls: list[bool] = []

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> Any:
        calls.append(options["enable_gqa"])
        assert key.shape[1] == value.shape[1] == (2 if shares else 6)

    monkeypatch.setattr(hybrid, "is_gpu", lambda states: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(hybrid.F, "scaled_dot_product_attention", attention)
    shapes = [(1, 6, 8, key_dim), (1, 2, 8, key_dim), (1, 2, 8, value_dim)]
    fused_attention(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), scale=1.0)
    assert calls == [shares]


def test_documents_need_no_mask_and_cost_only_their_own_squares() -> None:
    """Full heads: as many operations as the documents one by one, and no mask of all pairs."""
    lengths = [100, 300, 112]
    numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    case = Case(512, 16, 0, (True, True))
    context = AttentionContext(512, document=numbers[None])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        hybrid_attention(*case.tensors(torch.float32), case.layout(), context)
    calls = [e for e in profiler.events() if e.name == "aten::scaled_dot_product_attention"]
    assert [call.input_shapes[0][2] for call in calls] == lengths


def test_padded_rows_need_no_mask_and_cost_only_their_own_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows padded on the left are computed one by one: outputs and gradients are eager's."""
    monkeypatch.setattr(hybrid, "MIN_PADDED", 2)
    case = Case(40, 8, 0, (True, False), batch=3, padding="left", seed=3)
    padding = case.context().left_padding()
    assert padding is not None and len({*padding}) == 3
    calls = []

    def attention(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Tensor:
        calls.append((query.shape, options["mask"]))
        return fused(query, key, *others, **options)

    fused = hybrid.fused_attention
    monkeypatch.setattr(hybrid, "fused_attention", attention)
    results = {}
    for backend in ("eager", "sdpa"):
        tensors = case.tensors()
        out = hybrid_attention(*tensors, case.layout(), case.context(), backend=backend)
        out = out * case.context().valid[:, :, None, None]
        results[backend] = [out, *torch.autograd.grad(out.square().sum(), tensors)]
    for eager, fast in zip(*results.values(), strict=True):
        torch.testing.assert_close(fast, eager)
    own = [(shape[0], shape[2]) for shape, mask in calls if shape[2] > 1 and mask is None]
    assert {(1, 40 - slots) for slots in padding} <= {*own}
    assert not [shape for shape, mask in calls if shape[2] == 40 and mask is not None]


@pytest.mark.parametrize("padding", ["right", "holes"])
def test_other_padding_needs_a_mask(padding: str) -> None:
    case = Case(40, 8, 0, (True, False), batch=3, padding=padding, seed=3)
    assert case.context().left_padding() is None
    assert Case(40, 8, 0, (True,)).context().left_padding() is None


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
