"""Backends against loops that share no code with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.attention import AttentionContext, hybrid_attention, pass_context
from bosch.model.static_cache import StaticHybridCacheLayer
from bosch.window import Window
from tests.attention_case import Case, cases, full_first
from tests.plain_attention import plain_attention

_NEAR = {"rtol": 1e-9, "atol": 1e-9}


def _expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs by loops, [B, T, HQ, D], and which queries are real, [B, T]."""
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
    """Sinks, padding of every kind, packed documents and a past."""
    case = replace(case, batch=1) if case.length > 40 else case
    expected, real = _expected(case)
    output = hybrid_attention(*case.tensors(), case.layout(), case.context(), backend=backend)
    torch.testing.assert_close(output.detach()[real], expected[real], **_NEAR)


def test_layers_on_another_device_have_their_own_masks() -> None:
    """A model of several devices shares the context of a pass."""
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


@pytest.mark.parametrize("sizes", [[1] * 23, [10, 1, 1, 9, 2], [2, 1, 20]])
@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (5, 3), (1, 2)])
def test_the_ring_holds_the_last_tokens_and_the_sinks(
    sizes: list[int], window: int, sinks: int
) -> None:
    """Entry S + p modulo W of a row is the newest token p of that remainder."""
    layer = StaticHybridCacheLayer(full_first(0, 1, Window(window, sinks)), 40)
    length = 0
    for size in sizes:
        tokens = torch.arange(length, length + size).float()[None, None, :, None]
        keys, _ = layer.update(tokens, tokens.clone())
        start = torch.tensor(length) if size == 1 else None  # a pass of one reads no number
        keys.settle(AttentionContext(size, length, start=start))
        length += size
        ring = [-1] * window
        for token in range(length):
            ring[token % window] = token
        entries = layer.groups[0].keys.flatten().tolist()
        assert entries[:sinks][:length] == list(range(sinks))[:length]
        filled = [place for place, token in enumerate(ring) if token >= 0]
        assert [entries[sinks + place] for place in filled] == [ring[place] for place in filled]
        if size == 1 and length >= window:
            assert keys.groups[0].slots.tolist() == ring
