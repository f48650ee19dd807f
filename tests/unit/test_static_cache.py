"""The static cache: the dynamic one's results in memory of a fixed size, decoding compiled once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from bosch.heads import HeadMask
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask
from bosch.model.static_cache import StaticHybridCache, StaticHybridCacheLayer
from bosch.window import Window
from tests.attention_case import full_first
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_model, tokens

WINDOW, LENGTH = 6, 30
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


def _hybrid(sinks: int, window: int = WINDOW) -> Any:
    return materialize(small_model(), random_mask(), Window(window, sinks))


def _few_layers(layers: int, sinks: int) -> Any:
    """Compiling takes seconds for each layer."""
    model = small_model(num_hidden_layers=layers)
    return materialize(model, HeadMask(random_mask().is_full[:layers]), Window(WINDOW, sinks))


def _left_padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Padding masks with more and more padding, and the positions of the tokens."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, pad in enumerate((0, 4, 17)[:batch]):
        mask[row, :pad] = 0
    return mask, (mask.cumsum(-1) - 1).clamp(min=0)


def _in_chunks(forward: Any, cache: Any, ids: Tensor, sizes: list[int], **padded: Any) -> Tensor:
    outputs, start = [], 0
    for size in sizes:
        stop, part = start + size, {}
        if padded:
            part["attention_mask"] = padded["attention_mask"][:, :stop]
            part["position_ids"] = padded["position_ids"][:, start:stop]
        outputs.append(forward(input_ids=ids[:, start:stop], past_key_values=cache, **part).logits)
        start = stop
    assert start == ids.shape[1] == int(cache.get_seq_length())
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 30,
        [30],
        [3] + [1] * 27,
        [20] + [1] * 10,
        [3, 5, 1, 6, 7, 1, 7],
        [WINDOW - 1, WINDOW, WINDOW + 1, 12],
    ],
    ids=["tokens", "whole", "short", "prefill", "chunks", "window"],
)
def test_any_chunking_equals_one_pass_without_a_cache(
    sizes: list[int], sinks: int, padding: bool
) -> None:
    model, ids = _hybrid(sinks), tokens(3, LENGTH)
    mask, positions = _left_padded(3, LENGTH)
    padded = {"attention_mask": mask, "position_ids": positions} if padding else {}
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False, **padded).logits
    real = mask.bool() if padding else torch.ones_like(ids, dtype=torch.bool)
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        for cache in (model.new_static_cache(LENGTH + 3), model.new_cache()):
            result = _in_chunks(model, cache, ids, sizes, **padded)
            torch.testing.assert_close(result[real], expected[real], **_NEAR)


@pytest.mark.parametrize(("sinks", "padding"), [(0, False), (4, True)])
def test_decoding_compiles_once_without_a_graph_break(sinks: int, padding: bool) -> None:
    """The ring goes round while the same graph runs; in padded rows sinks arrive meanwhile."""
    model, ids = _few_layers(2, sinks), tokens(3, LENGTH)
    mask, positions = _left_padded(3, LENGTH)
    padded = {"attention_mask": mask, "position_ids": positions} if padding else {}
    expected = model(ids, use_cache=False, **padded).logits
    cache = model.new_static_cache(LENGTH)
    model(**{"input_ids": ids[:, :3], **{k: v[:, :3] for k, v in padded.items()}},
          past_key_values=cache)  # fmt: skip
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    whole = model.create_masks_for_generate(
        config=model.config, inputs_embeds=torch.zeros(3, 1, 1),
        attention_mask=mask if padding else None, past_key_values=cache,
    )  # fmt: skip
    result = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for slot in range(3, LENGTH):
            part = {"input_ids": ids[:, slot : slot + 1], "past_key_values": cache}
            if padding:
                part |= {"attention_mask": whole, "position_ids": positions[:, slot : slot + 1]}
            result.append(step(**part).logits)
    real = mask[:, 3:].bool() if padding else slice(None)
    torch.testing.assert_close(torch.cat(result, 1)[real], expected[:, 3:][real], **_NEAR)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str
)
def test_generate_asks_for_it_as_for_transformers_own(sinks: int, options: Any) -> None:
    model, ids = _hybrid(sinks), tokens(3, 20)
    mask, _ = _left_padded(3, 20)
    options |= {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    result = model.generate(
        ids, cache_implementation="static", return_dict_in_generate=True, **options
    )
    assert torch.equal(result.sequences, expected)
    assert isinstance(result.past_key_values, StaticHybridCache)


def test_generate_compiles_each_kind_of_pass_once() -> None:
    """Over two calls of different lengths, the first of them the longer one."""
    model = _few_layers(1, 4)
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 8, "do_sample": False}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 13):
            ids = tokens(2, length)
            result = model.generate(
                ids, cache_implementation="static", compile_config=compiling, **options
            )
            assert torch.equal(result, model.generate(ids, **options))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# transformers compiles no steps of beams.
@pytest.mark.parametrize(("beams", "graphs"), [(1, 2), (2, 1)])
def test_generate_compiles_the_chunks_of_a_prompt(beams: int, graphs: int) -> None:
    model, ids = _few_layers(1, 4), tokens(2, 24)
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": beams}
    result = model.generate(
        ids, cache_implementation="static", compile_config=compiling, prefill_chunk_size=8,
        **options,
    )  # fmt: skip
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert torch.equal(result, model.generate(ids, **options))


def test_static_cache_of_transformers_is_exact_in_both_modes() -> None:
    """It holds every token of every head; decoding with it compiles as well."""
    ids, hybrid = tokens(2, LENGTH), _hybrid(4)
    searched = small_model()
    apply_head_mask(searched, random_mask(), Window(WINDOW, 4))
    for model in (hybrid, searched):
        expected = model(ids, use_cache=False).logits
        cache = StaticCache(model.config, LENGTH)
        result = _in_chunks(model, cache, ids, [12, 5, *[1] * 13])
        torch.testing.assert_close(result, expected, **_NEAR)
    options = {"max_new_tokens": 6, "do_sample": False}
    generated = [
        m.generate(ids, cache_implementation="static", **options) for m in (hybrid, searched)
    ]
    assert torch.equal(*generated)


def test_reorder_keeps_the_tensors_and_moves_the_rows() -> None:
    model, ids = _hybrid(2), tokens(2, 20)
    cache = model.new_static_cache(20)
    model(ids[:, :15], past_key_values=cache)
    places = [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert places == [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    result = model(ids[:, 15:].flip(0), past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits[:, 15:].flip(0)
    torch.testing.assert_close(result, whole, **_NEAR)
    cache.reset()
    torch.testing.assert_close(
        model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits
    )


def test_crop_is_exact_until_the_ring_has_gone_round_and_refused_after() -> None:
    model, ids = _hybrid(2), tokens(1, 20)
    cache = model.new_static_cache(20)
    model(ids[:, :3], past_key_values=cache)
    model(tokens(1, 3, seed=9), past_key_values=cache)
    cache.crop(-3)
    rest = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((3, 4), (4, 5), (5, 20))]
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 3:], **_NEAR)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"of 20 .* hold the last 6; use the dynamic cache"):
        cache.crop(-1)
    assert int(cache.get_seq_length()) == 20
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)
    for layer, removed in zip(cache.layers, (20, 99), strict=False):
        layer.crop(-removed)
        assert int(layer.get_seq_length()) == 0


def test_a_pass_beyond_the_end_is_refused() -> None:
    layer = StaticHybridCacheLayer(full_first(1, 2, Window(4)), 10)
    states = torch.zeros(1, 2, 8, 4)
    layer.update(states, states)
    with pytest.raises(ValueError, match="room for 10 tokens and would get 16"):
        layer.update(states, states)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_cache_of_transformers_that_holds_states_keeps_them(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The original reads the prompt, its hybrid of full heads resumes from there, and says so."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    original, ids = small_model(), tokens(2, LENGTH)
    expected = original(ids).logits[:, 12:]
    cache = StaticCache(original.config, LENGTH) if kind == "static" else DynamicCache()
    original(ids[:, :12], past_key_values=cache)
    hybrid = materialize(small_model(), HeadMask.all_full(LAYERS, KV_HEADS), Window(WINDOW))
    layers = cache.layers
    result = hybrid(ids[:, 12:], past_key_values=cache).logits
    assert cache.layers is layers
    assert "keep all tokens and save no memory" in capfd.readouterr().err + caplog.text
    torch.testing.assert_close(result, expected, **_NEAR)
