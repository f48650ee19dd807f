"""Hybrid attention: the oracle against a plain loop, and what holds for every backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from bosch import backends
from bosch.attention import (
    BACKENDS,
    AttentionContext,
    HeadGroup,
    HeadLayout,
    causal,
    hybrid_attention,
    resolve_backend,
)
from bosch.attention.sdpa import bands
from bosch.backends import BackendName, lacking
from bosch.errors import UserError
from bosch.model.code_file import MODULES
from bosch.window import Window
from tests.attention_case import Case, cases, full_first
from tests.hybrid_case import sees

_FAST = ["sdpa"]


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_oracle_sees_what_the_convention_says(case: Case) -> None:
    context, total = case.context(), case.past + case.length
    queries, keys = torch.arange(case.past, total)[None], torch.arange(total)[None]
    for window in (None, Window(case.window, case.sinks)):
        result = context.visible(queries, keys, window).expand(case.batch, -1, -1)
        for row in range(case.batch):
            valid = [True] * total if context.valid is None else context.valid[row].tolist()
            document = [0] * total if context.document is None else context.document[row].tolist()
            expected = [
                [sees(q, k, valid, document, window) for k in range(total)]
                for q in range(case.past, total)
            ]
            assert result[row].tolist() == expected


@pytest.mark.parametrize("backend", ["eager", *_FAST])
def test_all_full_is_causal_attention(backend: str) -> None:
    case = Case(37, 8, 0, (True, True))
    query, key, value = case.tensors()
    out = hybrid_attention(query, key, value, case.layout(), backend=backend)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("backend", ["eager", *_FAST])
@pytest.mark.parametrize("sinks", [0, 3])
def test_key_outside_the_window_has_no_influence(backend: str, sinks: int) -> None:
    """Changing key j changes query t of a sliding head exactly when t - W < j <= t or j < sinks."""
    case = Case(50, 9, sinks, (False, True))
    query, key, value = (x.detach() for x in case.tensors())
    before = hybrid_attention(query, key, value, case.layout(), backend=backend)
    for j in (0, sinks, 20, 49):
        other = value.clone()
        other[:, :, j] += 1.0
        after = hybrid_attention(query, key, other, case.layout(), backend=backend)
        changed = (after - before).abs().amax(dim=-1)[0] > 1e-12  # [T, HQ]
        for t in range(50):
            assert changed[t, 0].item() == (t - 9 < j <= t or j < min(sinks, t + 1))
            assert changed[t, 2].item() == (j <= t)


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


@pytest.mark.parametrize("backend", ["sdpa"])
def test_bfloat16_is_as_near_to_the_truth_as_eager(backend: str) -> None:
    case = Case(200, 16, 0, (True, False))
    exact = hybrid_attention(*case.tensors(), case.layout(), backend="eager")
    low = case.tensors(torch.bfloat16)
    errors = [
        (hybrid_attention(*low, case.layout(), backend=name) - exact).abs().max().item()
        for name in ("eager", backend)
    ]
    assert errors[1] <= 2 * errors[0] + 1e-3


@pytest.mark.parametrize(("block", "window", "count"), [(4, 4, 3), (4, 7, 3), (5, 2, 4), (3, 9, 1)])
def test_bands_are_the_slices_and_gradients_add_up(block: int, window: int, count: int) -> None:
    keys = torch.randn(2, count * block + window, 3, dtype=torch.float64, requires_grad=True)
    result = bands(keys, block, window)
    slices = [keys[:, i * block : i * block + block + window] for i in range(count)]
    expected = torch.stack(slices)
    assert torch.equal(result, expected)
    assert result.data_ptr() == keys.data_ptr()
    weight = torch.randn_like(expected)
    (a,) = torch.autograd.grad((result * weight).sum(), keys)
    (b,) = torch.autograd.grad((expected * weight).sum(), keys)
    torch.testing.assert_close(a, b)


def test_large_chunk_with_a_past_needs_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(300, 16, 2, (True, False), past=200)
    expected = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend="eager")
    monkeypatch.setattr(causal, "DENSE_MASK_ENTRIES", 40_000)
    result = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend="sdpa")
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rows", [(True, True), (True, False)], ids=str)
@pytest.mark.parametrize(("length", "past"), [(2, 1), (3, 40), (40, 3), (70, 70), (300, 200)])
def test_a_chunk_after_a_past_needs_no_mask_of_full_heads(
    length: int, past: int, rows: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(length, 16, 0, rows, batch=2, past=past)
    tensors, visible, shapes = case.tensors(), AttentionContext.visible, []

    def watched(
        context: AttentionContext, queries: torch.Tensor, keys: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        shapes.append(keys.shape[-1])
        return visible(context, queries, keys, *more)

    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        exact = hybrid_attention(*tensors, case.layout(), case.context(), backend="eager")
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(AttentionContext, "visible", watched)
            states = (x.to(dtype) for x in tensors)
            result = hybrid_attention(*states, case.layout(), case.context(), backend="sdpa")
        torch.testing.assert_close(result.double(), exact, rtol=near, atol=near)
    assert not shapes if all(rows) else max(shapes, default=0) < length + past


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


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'cuda' is unknown"):
        resolve_backend("cuda")
    assert resolve_backend("auto") in BACKENDS


def test_heads_that_do_not_fit_are_refused() -> None:
    query, key, value = Case(5, 4, 0, (True, False)).tensors()
    with pytest.raises(ValueError, match="3 KV heads"):
        hybrid_attention(query, key, value, full_first(1, 3, Window(4)))
    with pytest.raises(ValueError, match="partition"):
        HeadLayout((HeadGroup((0,)), HeadGroup((0, 1), Window(4))))
    with pytest.raises(ValueError, match="differ in window and not in sinks"):
        HeadLayout((HeadGroup((0,), Window(4, 1)), HeadGroup((1,), Window(5))))
    with pytest.raises(ValueError, match="window_size"):
        full_first(1, 2, Window(0))


def test_a_backend_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else names it: here one that stands in the tests."""
    folder = str(Path(__file__).parents[1] / "own_backend")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, folder])
    known = dict(BACKENDS)
    try:
        backends.register_all([folder])
        assert list(BACKENDS) == [*known, "plain"]
        assert resolve_backend("plain") == "plain"
        (sentence,) = lacking("plain", {"sinks": "the layout has 2"})
        assert sentence == "plain has no sinks, the layout has 2; choose sdpa or flex"
        states = Case(5, 9, 0, (True, False)).tensors()
        layout = HeadLayout.deploy({None: 1, Window(4): 1})
        expected = hybrid_attention(*states, layout, backend="eager")
        assert torch.equal(hybrid_attention(*states, layout, backend="plain"), expected)
        with pytest.raises(UserError, match="plain has no sinks"):
            hybrid_attention(
                *states, HeadLayout.deploy({None: 1, Window(4, 1): 1}), backend="plain"
            )
    finally:
        BACKENDS.clear()
        BACKENDS.update(known)
        sys.modules.pop("bosch.backends.plain", None)


def test_every_file_of_a_backend_is_found_and_goes_with_a_saved_model() -> None:
    files = {path.stem for path in Path(backends.__file__).parent.glob("[a-z]*.py")}
    assert files == set(BACKENDS)
    assert {f"backends/{name}.py" for name in files} <= set(MODULES)


def test_every_backend_that_a_recipe_may_name_has_an_entry_and_nothing_lacks_sdpa() -> None:
    assert set(get_args(BackendName)) == {"auto", *BACKENDS}
    for name, entry in BACKENDS.items():
        for ability in entry.lacks:
            (sentence,) = lacking(name, {ability: "somebody asks"})
            assert sentence.startswith(name) and ", somebody asks; choose sdpa" in sentence
    assert lacking("auto", {"sinks": "x"}) == lacking("sdpa", {"sinks": "x"}) == []
    (sentence, _) = lacking("flash", {"sinks": "x", "softcap": "y"})
    assert sentence == "flash has no sinks, x; choose sdpa"
