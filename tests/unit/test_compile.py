"""Compiled layers in training, and search mode with many masks: correct, without repeated work."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from bosch.attention import flex, hybrid_attention
from bosch.hybrid import AttentionContext
from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window
from tests.attention_case import by_rows
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_model, tokens

WINDOW, LENGTH = 7, 40


@pytest.fixture(autouse=True)
def _no_graphs_left() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _documents(seed: int) -> AttentionContext:
    generator = torch.Generator().manual_seed(seed)
    borders = torch.rand(2, LENGTH, generator=generator) < 0.1
    return AttentionContext(LENGTH, document=borders.long().cumsum(-1))


def test_a_compiled_layer_trains_like_the_layer() -> None:
    """Outputs and all gradients; other data and other documents use the same graph."""
    model = materialize(small_model(), random_mask(Window(WINDOW, 4)))
    layer, positions = model.model.layers[0].train(), torch.arange(LENGTH)[None]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(3):
        states = torch.randn(2, LENGTH, 48, requires_grad=True)
        result = []
        for run in (layer, compiled):
            with torch._dynamo.config.patch(error_on_recompile=True):
                out = run(
                    states,
                    attention_mask=_documents(step),
                    position_ids=positions,
                    position_embeddings=model.model.rotary_emb(states, positions),
                )
            inputs = [states, *layer.parameters()]
            result.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
        for ours, expected in zip(result[1], result[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _alive() -> tuple[int, int, int]:
    """Number and bytes of the tensors alive, and number of bosch's own objects."""
    gc.collect()
    everything = gc.get_objects()
    held = [x for x in everything if type(x) in (Tensor, torch.nn.Parameter)]
    ours = sum(str(type(x).__module__).startswith("bosch") for x in everything)
    return len(held), sum(x.untyped_storage().nbytes() for x in held), ours


def test_passes_with_changing_masks_leak_nothing() -> None:
    """Every row that a layer can have, three times: after the first time nothing more is kept."""
    model, ids = small_model(), tokens(2, LENGTH)
    prepare_for_search(model)
    rows = [[bool(bits >> head & 1) for head in range(KV_HEADS)] for bits in range(2**KV_HEADS)]
    alive = []
    with torch.no_grad():
        for _ in range(3):
            for row in rows:
                apply_head_mask(model, HeadMask.of(np.array([row] * LAYERS), Window(WINDOW, 2)))
                model(ids, use_cache=False)
            alive.append(_alive())
    assert alive[0] == alive[1] == alive[2]


def test_a_new_head_mask_does_not_compile_the_flex_kernel_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
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
