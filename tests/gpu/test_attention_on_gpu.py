"""Attention backends on a GPU: as near to the exact result as the oracle in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bosch.attention import BACKENDS, HeadLayout, Span, hybrid_attention
from bosch.modeling import materialize
from tests.attention_case import Case
from tests.hybrid_case import random_mask, small_model, tokens

DEPTH = 64


def _tensors(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Random states with heads of a size that the kernels have."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, total = len(case.rows), case.past + case.length
    shapes = [(heads * case.q_per_kv, case.length), (heads, total), (heads, total)]
    made = [torch.randn(case.batch, *x, DEPTH, generator=generator) for x in shapes]
    return [x.to("cuda", dtype).requires_grad_() for x in made]


def _results(case: Case, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients at the real tokens, in float64."""
    tensors, span = _tensors(case, dtype), case.span()
    marks = [None if x is None else x.cuda() for x in (span.valid, span.document)]
    span = Span(span.q_length, span.q_offset, *marks)
    out = hybrid_attention(*tensors, case.layout(), span, backend=backend)
    if span.valid is not None:
        out = out * span.valid[:, case.past :, None, None]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad((out * weight).sum(), tensors)
    return [x.detach().double() for x in (out, *gradients)]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash"])
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
    found = _results(case, backend, torch.bfloat16)
    for ours, theirs, truth in zip(found, rounded, exact, strict=True):
        allowed = 2 * (theirs - truth).abs().max() + 1e-3
        assert (ours - truth).abs().max() <= allowed


def test_static_cache_decodes_compiled_with_the_same_tokens() -> None:
    """`generate` compiles by itself on a GPU; the second call compiles nothing."""
    model: Any = materialize(small_model(), random_mask(), 7, 4).cuda()
    for length in (30, 20):
        ids = tokens(2, length).cuda()
        options = {"max_new_tokens": 12, "do_sample": False}
        wanted = model.generate(ids, **options)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(found, wanted)


def test_a_chunk_after_a_long_past_makes_no_mask() -> None:
    """A mask of its 2,048 x 34,816 pairs would be 68 MiB."""
    tensors = _tensors(Case(2048, 128, 0, (True, True), past=32768), torch.bfloat16)
    layout = HeadLayout.search([True, True], 128)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        hybrid_attention(*tensors, layout)
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20
