"""Backends and caches against loops that share no code with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.attention import AttentionContext, hybrid_attention
from bosch.model.cache import HybridCacheLayer
from bosch.model.interface import context_of_pass
from bosch.model.static_cache import StaticHybridCacheLayer
from bosch.window import Window
from tests.attention_case import WIDTHS, Case, cases, full_first
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


@st.composite
def passes(draw: st.DrawFn) -> tuple[Case, list[int]]:
    """A problem without a past, and the sizes of the passes over a cache that compute it."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 17]), min_size=2, max_size=14))
    return Case(
        sum(sizes),
        window=draw(st.sampled_from([1, 2, 5, 16])),
        sinks=draw(st.sampled_from([0, 1, 4])),
        rows=draw(st.sampled_from([(False,), (True, False), (False, True, False)])),
        widths=draw(st.sampled_from(WIDTHS)),
        batch=2,
        padding=draw(st.sampled_from(["none", "left"])),
        seed=draw(st.integers(0, 9)),
    ), sizes


@settings(max_examples=40, deadline=None)
@given(
    drawn=passes(),
    kind=st.sampled_from(["dynamic", "static"]),
    backend=st.sampled_from(["eager", "sdpa"]),
)
def test_passes_over_a_cache_equal_plain_loops(
    drawn: tuple[Case, list[int]], kind: str, backend: str
) -> None:
    case, sizes = drawn
    layout, valid = case.layout(), case.context().valid
    query, key, value = (x.detach() for x in case.tensors())
    layer: Any = HybridCacheLayer(layout)
    if kind == "static":
        layer = StaticHybridCacheLayer(layout, case.length + 3)
    outputs, start = [], 0
    for size in sizes:
        new = slice(start, start + size)
        context = context_of_pass(
            case.batch,
            size,
            layer.get_mask_sizes(size)[0],
            layer.get_seq_length(),
            attention_mask=None if valid is None else valid[:, : new.stop],
        )
        keys, values = layer.update(key[:, :, new], value[:, :, new])
        attention = hybrid_attention(
            query[:, :, new], keys, values, layout, context, backend=backend
        )
        outputs.append(attention)
        keys.settle(context)
        start = new.stop
    expected, real = _expected(case)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[real], expected[real], **_NEAR)


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
        keys.settle(AttentionContext(size, length))
        length += size
        ring = [-1] * window
        for token in range(length):
            ring[token % window] = token
        entries = layer.groups[0].keys.flatten().tolist()
        assert entries[:sinks][:length] == list(range(sinks))[:length]
        filled = [place for place, token in enumerate(ring) if token >= 0]
        assert [entries[sinks + place] for place in filled] == [ring[place] for place in filled]
