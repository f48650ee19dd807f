"""The flex backend against the oracle: its masks and gradients, without a compiler, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from bosch.attention import BACKENDS, AttentionContext, flex, hybrid_attention, resolve_backend
from bosch.errors import UserError
from bosch.window import Window
from tests.attention_case import by_rows, full_first

LENGTH = 70


@pytest.fixture(autouse=True)
def _small_blocks_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "FLEX_BLOCK", 16)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *states: None)  # refuses gradients


def _context(kind: str, past: int) -> AttentionContext:
    valid = document = None
    if kind == "left":
        valid = torch.ones(2, LENGTH + past, dtype=torch.bool)
        valid[1, :41] = False
    elif kind == "holes":
        valid = torch.rand(2, LENGTH + past, generator=torch.Generator().manual_seed(0)) < 0.7
    elif kind == "documents":
        document = torch.zeros(2, LENGTH, dtype=torch.long)
        document[0, 5:], document[0, 64:], document[1, 30:] = 1, 2, 1
    return AttentionContext(LENGTH, past, valid, document)


CONTEXTS = pytest.mark.parametrize(
    ("kind", "past"), [("none", 0), ("none", 21), ("left", 0), ("holes", 21), ("documents", 0)]
)
WINDOWS = pytest.mark.parametrize(
    ("window", "sinks"), [(1, 0), (19, 0), (19, 3), (40, 20), (200, 2)]
)


@CONTEXTS
@WINDOWS
def test_flex_equals_the_oracle(kind: str, past: int, window: int, sinks: int) -> None:
    torch.manual_seed(0)
    layout = by_rows([True, False, True, False], Window(window, sinks))
    query = torch.randn(2, 8, LENGTH, 16, requires_grad=True)
    key, value = (torch.randn(2, 4, LENGTH + past, 16, requires_grad=True) for _ in range(2))
    weight = torch.randn(2, LENGTH, 8, 16)
    result = {}
    for name in ("eager", "flex"):
        context = _context(kind, past)
        out = hybrid_attention(query, key, value, layout, context, backend=name)
        grads = torch.autograd.grad((out * weight).sum(), (query, key, value))
        result[name] = [out.detach(), *grads]
    for ours, expected in zip(result["flex"], result["eager"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@CONTEXTS
@WINDOWS
def test_every_block_a_head_sees_is_listed(kind: str, past: int, window: int, sinks: int) -> None:
    """Without a compiler the blocks are not used: what a GPU skips is asked of the mask."""
    context, kind_of = _context(kind, past), Window(window, sinks)
    layout = full_first(1, 2, kind_of)
    mask = flex.flex_block_mask(layout, context, 2, torch.device("cpu"))
    queries, keys = past + torch.arange(80)[None], torch.arange(-(-(LENGTH + past) // 16) * 16)
    for head, window_of_head in enumerate((None, kind_of)):
        visible = context.visible(queries, keys[None], window_of_head)
        blocks = visible.unflatten(-1, (-1, 16)).unflatten(1, (-1, 16))  # [b, nq, 16, nk, 16]
        listed = mask.to_dense().bool()[:, head]
        assert bool((listed | ~blocks.any(dim=(2, 4))).all())


def test_blocks_no_head_sees_are_not_listed() -> None:
    """Sliding heads list a number of blocks that does not grow with the length."""
    layout = full_first(1, 2, Window(16))
    mask = flex.flex_block_mask(layout, AttentionContext(160), 2, torch.device("cpu"))
    listed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert listed[0, 0].tolist() == list(range(1, 11))
    assert listed[0, 1].tolist() == [1] + [2] * 9


def test_flex_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = BACKENDS["flex"]._replace(usable=lambda: False)
    monkeypatch.setitem(BACKENDS, "flex", absent)
    with pytest.raises(UserError, match="'flex' cannot be used here"):
        resolve_backend("flex")


def test_dropout_is_refused_not_forgotten() -> None:
    states = torch.randn(1, 2, 32, 16)
    with pytest.raises(ValueError, match="no attention dropout"):
        hybrid_attention(
            states, states, states, full_first(1, 2, Window(4)), dropout=0.1, backend="flex"
        )
