"""The flex kernel as inductor makes it, here for the CPU, which has its forward pass only."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from bosch.attention import AttentionContext, flex, hybrid_attention
from bosch.window import Window
from tests.attention_case import by_rows


def test_a_new_head_mask_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("inductor")
    kernel = torch.compile(torch_flex.flex_attention, backend=counter)
    monkeypatch.setattr(flex, "kernel_for", lambda device: kernel)
    torch.manual_seed(0)
    length = 2 * flex.FLEX_BLOCK + 44
    query = torch.randn(2, 4, length, 16)
    key, value = (torch.randn(2, 2, length, 16) for _ in range(2))
    for is_full in ([True, False], [False, True], [False, False], [True, True]):
        layout = by_rows(is_full, Window(100))
        with torch.no_grad():
            ours, expected = (
                hybrid_attention(query, key, value, layout, AttentionContext(length), backend=name)
                for name in ("flex", "eager")
            )
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
