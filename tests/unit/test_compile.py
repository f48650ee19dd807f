"""Compiled layers in training, and search mode over many masks: right, and nothing made twice."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from bosch.attention import AttentionContext
from bosch.attention.sdpa import bands
from bosch.heads import HeadMask
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_model, tokens

WINDOW, LENGTH = 7, 40


@pytest.fixture(autouse=True)
def _no_graphs_left() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _span(packed: bool, seed: int) -> AttentionContext:
    if not packed:
        return AttentionContext(LENGTH)
    generator = torch.Generator().manual_seed(seed)
    borders = torch.rand(2, LENGTH, generator=generator) < 0.1
    return AttentionContext(LENGTH, document=borders.long().cumsum(-1))


@pytest.mark.parametrize(("sinks", "packed"), [(0, False), (0, True), (4, True)])
@pytest.mark.parametrize("searched", [False, True], ids=["deploy", "search"])
def test_compiled_layer_trains_as_the_layer_does(sinks: int, packed: bool, searched: bool) -> None:
    """Outputs and all gradients; other data and other documents run the same graph."""
    model = small_model()
    if searched:
        apply_head_mask(model, random_mask(), Window(WINDOW, sinks))
    else:
        model = materialize(model, random_mask(), Window(WINDOW, sinks))
    layer, positions = model.model.layers[0].train(), torch.arange(LENGTH)[None]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(3):
        states = torch.randn(2, LENGTH, 48, requires_grad=True)
        result = []
        for run in (layer, compiled):
            with torch._dynamo.config.patch(error_on_recompile=True):
                out = run(
                    states,
                    attention_mask=_span(packed, step),
                    position_ids=positions,
                    position_embeddings=model.model.rotary_emb(states, positions),
                )
            inputs = [states, *layer.parameters()]
            result.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
        for ours, expected in zip(result[1], result[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("block", "window"), [(4, 7), (16, 7), (4, 8)])
def test_gradient_of_compiled_bands(block: int, window: int) -> None:
    """Where the last piece of a band is no whole block, views with gaps would lose gradients."""
    keys = torch.randn(2, 3 * block + window, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, block + window, 3, dtype=torch.float64)

    def weighed(keys: Tensor) -> Tensor:
        return (bands(keys, block, window) * weight).sum()

    (expected,) = torch.autograd.grad(weighed(keys), keys)
    compiled = torch.compile(weighed, backend="aot_eager", fullgraph=True)
    (result,) = torch.autograd.grad(compiled(keys), keys)
    torch.testing.assert_close(result, expected)


def _alive() -> tuple[int, int, int]:
    """Number and bytes of the tensors that are alive, and number of bosch's own objects."""
    gc.collect()
    everything = gc.get_objects()
    held = [x for x in everything if type(x) in (Tensor, torch.nn.Parameter)]
    ours = sum(str(type(x).__module__).startswith("bosch") for x in everything)
    return len(held), sum(x.untyped_storage().nbytes() for x in held), ours


def test_passes_over_changing_masks_leave_nothing_behind() -> None:
    """Every row a layer can have, three times: after the first time nothing more is kept."""
    model, ids = small_model(), tokens(2, LENGTH)
    prepare_for_search(model)
    rows = [[bool(bits >> head & 1) for head in range(KV_HEADS)] for bits in range(2**KV_HEADS)]
    alive = []
    with torch.no_grad():
        for _ in range(3):
            for row in rows:
                apply_head_mask(model, HeadMask(np.array([row] * LAYERS)), Window(WINDOW, 2))
                model(ids, use_cache=False)
            alive.append(_alive())
    assert alive[0] == alive[1] == alive[2]


def test_a_compiled_search_runs_one_graph_for_each_split_of_the_heads() -> None:
    """Going back to a mask compiles nothing: the graphs of its layers are there."""
    model = small_model()
    prepare_for_search(model)
    layer, positions = model.model.layers[0], torch.arange(LENGTH)[None]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    states = torch.randn(1, LENGTH, 48)
    where = model.model.rotary_emb(states, positions)

    def run(seed: int) -> Tensor:
        mask = HeadMask(np.array([random_mask(seed).is_full[1]] * LAYERS))
        apply_head_mask(model, mask, Window(WINDOW))
        return compiled(
            states,
            attention_mask=AttentionContext(LENGTH),
            position_ids=positions,
            position_embeddings=where,
        )

    with torch.no_grad():
        first = [run(seed) for seed in range(3)]
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = [run(seed) for seed in (2, 0, 1)]
    assert torch.equal(torch.stack(again), torch.stack([first[2], first[0], first[1]]))
