"""Attention backends on a GPU: as near to the exact result as the oracle in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from bosch.attention import fastest_backend, hybrid_attention
from bosch.backends import BACKENDS
from bosch.hybrid import AttentionContext
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.attention_case import Case, by_rows
from tests.hybrid_case import random_mask, small_model, tokens

DEPTH = 64


def _tensors(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Random states with heads of a size that the kernels have."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, total = len(case.rows), case.past + case.length
    shapes = [(heads * case.q_per_kv, case.length), (heads, total), (heads, total)]
    states = [torch.randn(case.batch, *x, DEPTH, generator=generator) for x in shapes]
    return [x.to("cuda", dtype).requires_grad_() for x in states]


def _results(case: Case, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients at the real tokens, in float64."""
    tensors, context = _tensors(case, dtype), case.context()
    marks = [None if x is None else x.cuda() for x in (context.valid, context.document)]
    context = AttentionContext(context.q_length, context.q_offset, *marks)
    out = hybrid_attention(*tensors, case.layout(), context, backend=backend)
    if context.valid is not None:
        out = out * context.valid[:, case.past :, None, None]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad((out * weight).sum(), tensors)
    return [x.detach().double() for x in (out, *gradients)]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen"])
@pytest.mark.parametrize("rows", [(True, True), (False, False), (True, False)], ids=str)
@pytest.mark.parametrize(
    ("length", "past", "padding"),
    [
        (1000, 0, "none"),
        (257, 0, "left"),
        (1000, 0, "documents"),
        (300, 211, "left"),
        (300, 211, "none"),
    ],
)
def test_backend_is_as_exact_as_the_oracle(
    backend: str, rows: tuple[bool, ...], length: int, past: int, padding: str
) -> None:
    if not BACKENDS[backend].usable():
        pytest.skip(f"needs {BACKENDS[backend].needs}")
    case = Case(length, 128, 0, rows, batch=2, past=past, padding=padding)
    exact = _results(case, "eager", torch.float64)
    rounded = _results(case, "eager", torch.bfloat16)
    result = _results(case, backend, torch.bfloat16)
    for ours, theirs, truth in zip(result, rounded, exact, strict=True):
        allowed = 2 * (theirs - truth).abs().max() + 1e-3
        assert (ours - truth).abs().max() <= allowed


def test_static_cache_decodes_compiled_with_the_same_tokens() -> None:
    """`generate` compiles by itself on a GPU; the second call compiles nothing."""
    model: Any = materialize(small_model(), random_mask(Window(7, 4))).cuda()
    for length in (30, 20):
        ids = tokens(2, length).cuda()
        options = {"max_new_tokens": 12, "do_sample": False}
        expected = model.generate(ids, **options)
        with torch._dynamo.config.patch(error_on_recompile=True):
            result = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(result, expected)


def test_a_chunk_after_a_long_past_makes_no_mask() -> None:
    """A mask of its 2,048 x 34,816 pairs would be 68 MiB."""
    tensors = _tensors(Case(2048, 128, 0, (True, True), past=32768), torch.bfloat16)
    layout = by_rows([True, True], Window(128))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        hybrid_attention(*tensors, layout)
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20


def _math_kernels(work: Callable[[], object]) -> list[str]:
    """Names of the operations of `work` that hold all logits."""
    with profile() as profiler:
        work()
    names = {event.key for event in profiler.key_averages()}
    return [name for name in sorted(names) if "attention_math" in name or "softmax" in name]


@pytest.mark.parametrize("padding", ["none", "right", "left", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_pass_with_shared_heads_runs_the_math_kernel(padding: str, dtype: torch.dtype) -> None:
    """Prefill and training of full and sliding heads, under masks and without."""
    case = Case(8192, 1024, 0, (True, False), batch=1, padding=padding)
    tensors, context = _tensors(case, dtype), case.context()
    marks = [None if x is None else x.cuda() for x in (context.valid, context.document)]
    context = AttentionContext(context.q_length, context.q_offset, *marks)

    def train() -> None:
        hybrid_attention(*tensors, case.layout(), context).sum().backward()

    assert _math_kernels(train) == []


def test_generation_runs_no_math_kernel() -> None:
    """Chunks after a past, with a cache."""
    case = Case(2048, 1024, 0, (True, False), past=8192)
    tensors = _tensors(case, torch.bfloat16)
    with torch.no_grad():
        assert _math_kernels(lambda: hybrid_attention(*tensors, case.layout())) == []


def test_training_takes_the_fastest_backend_that_is_installed() -> None:
    name = fastest_backend(torch.bfloat16)
    assert name != "sdpa" and BACKENDS[name].usable()
    assert fastest_backend(torch.float32) == "flex"
