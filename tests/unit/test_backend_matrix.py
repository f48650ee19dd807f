"""Every backend against the oracle, over shapes drawn by hypothesis, with and without caches.

flex runs without a compiler and in small blocks, varlen with a stand-in for its kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from bosch import attention
from bosch.attention import flex, hybrid_attention
from bosch.backends import BACKENDS, resolve_backend
from bosch.errors import UserError
from bosch.hybrid import AttentionContext, HeadGroupsLayer, context_of_pass
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window
from tests import fake_varlen
from tests.attention_case import WIDTHS, Case, cases, full_first
from tests.hybrid_case import random_mask, small_model, tokens
from tests.peak_memory import TensorBytes

_NEAR = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    fake_varlen.install(patch)
    yield
    patch.undo()


def _outputs_and_gradients(case: Case, backend: str, **options: Any) -> list[Tensor]:
    """Outputs, and gradients of a random sum of them; outputs of padding need only be finite."""
    tensors, context = case.tensors(), case.context()
    out = hybrid_attention(*tensors, case.layout(), context, backend=backend, **options)
    if context.valid is not None:
        assert out.isfinite().all()
        out = out * context.valid[:, case.past :, None, None]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def _check(case: Case) -> None:
    expected = _outputs_and_gradients(case, "eager")
    for backend in ("sdpa", "flex", "varlen"):
        if backend == "varlen" and case.sinks and not all(case.rows):
            with pytest.raises(UserError, match="has no sinks"):
                _outputs_and_gradients(case, backend)
        else:
            result = _outputs_and_gradients(case, backend)
            torch.testing.assert_close(result, expected, **_NEAR, msg=f"{backend}: {{}}".format)


_ROWS = [(True, True), (False, False), (True, False), (False, True, True)]


@settings(max_examples=40)
@given(case=cases())
@example(case=Case(40, 8, 4, (True, False), padding="documents"))
@example(case=Case(40, 8, 0, (True, False), padding="documents"))
@example(case=Case(300, 33, 3, (False, False), padding="left", batch=2))
@example(case=Case(33, 16, 4, (False,), past=7))
@example(case=Case(163, 32, 0, (True,), padding="left"))
@example(case=Case(5, 8, 0, (True, False), padding="left", batch=2, past=19))
@example(case=Case(20, 8, 0, (True, False), padding="left", batch=2, past=3, seed=3))
def test_a_backend_equals_the_oracle(case: Case) -> None:
    _check(case)


@pytest.mark.parametrize("rows", _ROWS, ids=str)
@pytest.mark.parametrize(("length", "window"), [(18, 19), (19, 19), (20, 19), (95, 19), (95, 1)])
def test_lengths_at_the_window_for_every_kind_of_mask(
    rows: tuple[bool, ...], length: int, window: int
) -> None:
    """Edge cases that must always run: T below, at, just above and far above W."""
    for sinks in (0, 4):
        _check(Case(length, window, sinks, rows, padding="documents" if sinks else "none"))


@pytest.mark.parametrize(
    ("padding", "rows", "kinds"),
    [("none", (True, True), 1), ("documents", (True, False, False), 2), ("left", (True, False), 0)],
)
def test_varlen_runs_its_kernel_once_for_each_kind_of_head(
    padding: str, rows: tuple[bool, ...], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whole sequences without padding."""
    kernel = Mock(side_effect=fake_varlen.varlen_attn)
    monkeypatch.setattr(torch_varlen, "varlen_attn", kernel)
    case = Case(70, 16, 0, rows, batch=2, padding=padding, seed=2)
    hybrid_attention(*case.tensors(), case.layout(), case.context(), backend="varlen")
    assert kernel.call_count == kinds


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ability", "dim", "options"),
    [
        ("", 256, {}),
        ("wide_heads", 264, {}),  # as the full heads of Gemma 4, of 512
        ("dropout", 16, {"dropout": 0.5}),
        ("softcap", 16, {"softcap": 2.0}),
        ("head_logits", 16, {"head_logits": torch.ones(4, dtype=torch.float64)}),
        ("float32", 16, {}),
    ],
)
def test_a_backend_computes_or_refuses_what_it_is_given(
    backend: str, ability: str, dim: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ability == "float32":
        monkeypatch.setattr(attention, "HALF_DTYPES", (torch.float16, torch.bfloat16))
    states = [torch.randn(1, heads, 40, dim, dtype=torch.float64) for heads in (4, 2, 2)]
    layout = full_first(1, 2, Window(4))
    if ability in BACKENDS[backend].lacks:
        with pytest.raises(UserError, match=rf"^attention: {backend} .*; choose .*sdpa"):
            hybrid_attention(*states, layout, backend=backend, **options)
        return
    out = hybrid_attention(*states, layout, backend=backend, **options)
    if ability != "dropout":
        expected = hybrid_attention(*states, layout, backend="eager", **options)
        torch.testing.assert_close(out, expected, **_NEAR)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[Case, list[int], str, str]:
    """A sequence in passes (a prompt in chunks, then single tokens), its cache and backend."""
    window = draw(st.sampled_from([1, 2, 5, 16]))
    one = st.sampled_from([1, 1, 2, window, window + 1, 19, 40])
    sizes = draw(st.lists(one, min_size=1, max_size=5))
    sizes += [1] * draw(st.integers(0, 12))
    backend = draw(st.sampled_from(["eager", "sdpa"]))
    case = Case(
        sum(sizes),
        window,
        draw(st.sampled_from([0, 1, 4])),
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=4))),
        batch=2,
        padding=draw(st.sampled_from(["none", "left"])),
        seed=draw(st.integers(0, 9)),
        widths=draw(st.sampled_from(WIDTHS)),
    )
    return case, sizes, backend, draw(st.sampled_from(["dynamic", "static"]))


@settings(max_examples=60, deadline=None)
@given(drawn=chunkings())
@example(drawn=(Case(20, 1, 4, (False,), batch=2), [1, 19], "sdpa", "dynamic"))
@example(drawn=(Case(59, 5, 4, (False,), batch=2, padding="left"), [19, 40], "sdpa", "dynamic"))
def test_chunks_and_decoding_with_a_cache_equal_the_oracle_without(
    drawn: tuple[Case, list[int], str, str],
) -> None:
    case, sizes, backend, kind = drawn
    query, key, value = (x.detach() for x in case.tensors())
    layout, context = case.layout(), case.context()
    expected = hybrid_attention(query, key, value, layout, context, backend="eager")
    layer: Any = HeadGroupsLayer(layout, case.length + 1 if kind == "static" else None)
    outputs, start = [], 0
    for size in sizes:
        stop = start + size
        part = context_of_pass(
            case.batch,
            size,
            layer.get_mask_sizes(size)[0],
            layer.get_seq_length(),
            attention_mask=None if context.valid is None else context.valid[:, :stop],
        )
        keys, values = layer.update(key[:, :, start:stop], value[:, :, start:stop])
        outputs.append(
            hybrid_attention(query[:, :, start:stop], keys, values, layout, part, backend=backend)
        )
        keys.done(part)
        if kind == "dynamic":
            for part, group in zip(layer.parts, layout.groups, strict=True):
                assert group.window is None or part.keys.shape[2] < group.window.max_keys
        start = stop
    real = (
        torch.ones(case.batch, case.length, dtype=torch.bool)
        if context.valid is None
        else context.valid
    )
    torch.testing.assert_close(torch.cat(outputs, dim=1)[real], expected[real], **_NEAR)


def _patched_varlen_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "varlen", BACKENDS["varlen"]._replace(usable=lambda: True))


def test_varlen_runs_in_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed documents, left padding, and generation with both caches."""
    _patched_varlen_is_usable(monkeypatch)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :11] = 0
    positions = torch.cat([torch.arange(13), torch.arange(27)]).expand(2, -1)
    model = small_model()
    apply_head_mask(model, random_mask(Window(7)))
    hybrid = materialize(model, random_mask(Window(7)))
    inputs = ({"position_ids": positions}, {"attention_mask": mask})
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected = [model(ids, use_cache=False, **x).logits for x in inputs]
        text = hybrid.generate(ids, **options)
        kernel = Mock(side_effect=fake_varlen.varlen_attn)
        monkeypatch.setattr(torch_varlen, "varlen_attn", kernel)
        prepare_for_search(model, "varlen")
        apply_head_mask(model, random_mask(Window(7)))
        hybrid.set_attn_implementation("flash_attention_2")
        for tried in (model, hybrid):
            for x, logits in zip(inputs, expected, strict=True):
                result = tried(ids, use_cache=False, **x).logits
                torch.testing.assert_close(result, logits, rtol=1e-4, atol=1e-5)
        assert kernel.call_count == 12  # sdpa computes the padded pass
        assert torch.equal(hybrid.generate(ids, **options), text)
        assert torch.equal(hybrid.generate(ids, cache_implementation="static", **options), text)


def test_varlen_refuses_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs a GPU and a torch with windows"):
        resolve_backend("varlen")
    _patched_varlen_is_usable(monkeypatch)
    hybrid = materialize(small_model(), random_mask(Window(7, 2)))
    hybrid.set_attn_implementation("varlen")
    with pytest.raises(UserError, match="varlen has no sinks, its layout has 2; choose sdpa"):
        hybrid(tokens(1, 9))
    model = small_model()
    prepare_for_search(model, "varlen")
    with pytest.raises(UserError, match="varlen has no sinks, its layout has 2; choose sdpa"):
        apply_head_mask(model, random_mask(Window(7, 2)))
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_3' has no hybrid"):
        hybrid.set_attn_implementation("flash_attention_3")
    monkeypatch.setattr(attention, "HALF_DTYPES", (torch.float16, torch.bfloat16))
    low = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    out = hybrid_attention(
        low, low, low, full_first(1, 2, Window(4)), AttentionContext(4), backend="varlen"
    )
    assert out.shape == (1, 4, 2, 8)


@pytest.mark.parametrize("padded", [False, True])
def test_sinks_copy_few_keys_of_a_prompt(padded: bool) -> None:
    """At most a quarter of the keys at a time, even if a band is much wider than a block."""
    length, heads, dim = 2112, 2, 16  # as many queries before the blocks with sinks
    states = [torch.randn(2, heads, length, dim) for _ in range(3)]
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :5] = False
    peaks = {}
    for sinks in (0, 4):
        layout = full_first(0, heads, Window(512, sinks))
        context = AttentionContext(length, valid=valid if padded else None)
        with TensorBytes() as memory, torch.no_grad():
            hybrid_attention(*states, layout, context)
        peaks[sinks] = memory.peak - memory.before
    assert peaks[4] - peaks[0] < states[0].nbytes


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_prompt_peaks_no_higher_than_with_full_heads_alone(sinks: int) -> None:
    """Both end with a copy in transformers' order, while the source of the copy is still held."""
    states = [torch.randn(1, heads, 4096, 64) for heads in (16, 4, 4)]
    peaks = []
    for full in (4, 1):
        with TensorBytes() as memory, torch.no_grad():
            hybrid_attention(*states, full_first(full, 4, Window(256, sinks)))
        peaks.append(memory.peak - memory.before)
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.parametrize(
    ("padding", "past"), [("none", 0), ("none", 21), ("left", 0), ("holes", 21), ("documents", 0)]
)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (19, 0), (19, 3), (40, 20), (200, 2)])
@pytest.mark.parametrize("length", [65, 70])  # a last block of one token, and of several
def test_every_block_that_a_head_sees_is_listed(
    padding: str, past: int, window: int, sinks: int, length: int
) -> None:
    """Without a compiler flex ignores the blocks; the mask tells which ones a GPU would skip."""
    case = Case(length, window, sinks, (True, False), batch=2, past=past, padding=padding)
    context = case.context()
    mask = flex.flex_block_mask(case.layout(), context, 2, torch.device("cpu"))
    queries, keys = past + torch.arange(80)[None], torch.arange(-(-(length + past) // 16) * 16)
    for head, window_of_head in enumerate(case.windows()):
        visible = context.visible(queries, keys[None], window_of_head)
        blocks = visible.unflatten(-1, (-1, 16)).unflatten(1, (-1, 16))  # [b, nq, 16, nk, 16]
        listed = mask.to_dense().bool()[:, head]
        assert bool((listed | ~blocks.any(dim=(2, 4))).all())


def test_blocks_that_no_head_sees_are_not_listed() -> None:
    """For sliding heads, the number of blocks does not grow with the length."""
    layout = full_first(1, 2, Window(16))
    mask = flex.flex_block_mask(layout, AttentionContext(160), 2, torch.device("cpu"))
    listed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert listed[0, 0].tolist() == list(range(1, 11))
    assert listed[0, 1].tolist() == [1] + [2] * 9


_CAPPED = {"softcap": 2.0}


def test_capped_logits_of_documents_have_the_gradients_of_the_oracle() -> None:
    case = Case(33, 2, 0, (False, True), padding="documents", batch=2)
    ours, theirs = (_outputs_and_gradients(case, name, **_CAPPED) for name in ("sdpa", "eager"))
    torch.testing.assert_close(ours, theirs, **_NEAR)


_LOST = {"head_logits": torch.full((8,), -9.0, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("backend", "options"),
    [(name, options) for name in ("eager", "sdpa") for options in ({}, _CAPPED, _LOST)],
)
@pytest.mark.parametrize("rows", [(True,), (False,)], ids=["full", "sliding"])
@pytest.mark.parametrize(
    "case",
    [
        Case(40, 8, 0, (), batch=2),
        Case(40, 8, 3, (), padding="left", batch=2),
        Case(40, 8, 0, (), padding="documents", batch=2),
        Case(5, 8, 0, (), past=30),
        Case(1, 8, 0, (), past=30),
    ],
    ids=["prompt", "padded", "documents", "chunk", "token"],
)
def test_dropout_is_applied_on_every_path(
    backend: str, case: Case, rows: tuple[bool, ...], options: dict[str, Any]
) -> None:
    """Values of one sum to one without dropout, and on average to one with it."""
    case = replace(case, rows=rows * 4)
    query, key, value = (x.detach() for x in case.tensors())
    states = query, key, torch.ones_like(value)
    out = hybrid_attention(
        *states, case.layout(), case.context(), backend=backend, dropout=0.5, **options
    )
    sums = out[..., 0]
    assert float(sums.std()) > 0.1
    assert float(sums.mean()) == pytest.approx(1, abs=0.5)
