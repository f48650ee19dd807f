"""The caches: what they hold, and that decoding with them equals computing everything again.

The static one does it in memory of a fixed size, and decoding with it compiles once.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from bosch.hybrid import (
    AttentionContext,
    HeadGroupsLayer,
    HeadLayout,
    HybridCache,
    adopt_cache,
    masks_for_generate,
)
from bosch.masks import HeadMask
from bosch.model.cache import held_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import DecoderLayers
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask
from bosch.window import Window
from tests.attention_case import full_first
from tests.hybrid_case import (
    KV_HEADS,
    LAYERS,
    mask_of,
    of_choices,
    random_mask,
    small_config,
    small_model,
    tokens,
)

WINDOW, LENGTH = 6, 30
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


def _hybrid(sinks: int) -> Any:
    return materialize(small_model(), random_mask(Window(WINDOW, sinks)))


@pytest.mark.parametrize("sinks", [0, 1, 4, 40])
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 40, 2**15])
@pytest.mark.parametrize(
    "counts", [((0, 0), (1, 0), (4, 0)), ((1, 2), (0, 1), (0, 4))], ids=["one window", "two"]
)
def test_the_formula_gives_the_bytes_that_caches_hold(
    sinks: int, length: int, counts: tuple[tuple[int, int], ...]
) -> None:
    heads, batch, dim = 4, 2, 8
    narrow, wide = Window(WINDOW, sinks), Window(2 * WINDOW, sinks)
    rows = [{None: full, wide: wider, narrow: 4 - full - wider} for full, wider in counts]
    size = CacheSize.of(rows, DecoderLayers(3, (0, 1, 2), heads, dim), 2, state_bytes=0)
    layouts = [
        HeadLayout.of([0] * full + [wide.size] * wider + [WINDOW] * (4 - full - wider), sinks)
        for full, wider in counts
    ]
    states = torch.zeros(batch, heads, length, dim, dtype=torch.bfloat16)
    dynamic, static = HybridCache(layouts), HybridCache(layouts, length)
    for layer in range(len(rows)):
        keys, _ = dynamic.update(states.clone(), states.clone(), layer)
        keys.done(AttentionContext(length))
        static.update(states.clone(), states.clone(), layer)
    assert held_bytes(dynamic) == batch * size.dynamic(length)
    assert held_bytes(static) == batch * size.static(length)
    if length < WINDOW:
        assert size.dynamic(length) == size.original(length)


def test_layers_that_slide_in_the_original_are_counted() -> None:
    """Three of 2 KV heads, of 64 bytes a token each, and one of 4, of 32 bytes."""
    kinds = DecoderLayers(4, (3,), 4, 8, {0: 8, 1: 16, 2: 8}, own_heads=2, own_head_dim=16)
    size = CacheSize.of([{None: 4}], kinds, 2, state_bytes=5)
    full = 4 * 32 * 100 + 5
    assert size.original(100) == size.dynamic(100) == full + 2 * 64 * (7 + 15 + 7)
    assert size.static(100) == full + 2 * 64 * (8 + 16 + 8)


@torch.enable_grad()
def test_gradients_of_chunks_with_a_cache_equal_those_of_one_pass() -> None:
    model, ids = _hybrid(2), tokens(2, 20)

    def gradients(*chunks: Tensor) -> list[Tensor]:
        model.zero_grad()
        cache = model.new_cache()
        logits = [model(chunk, past_key_values=cache).logits for chunk in chunks]
        torch.cat(logits, 1).square().mean().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    torch.testing.assert_close(gradients(*ids.split(7, 1)), gradients(ids), **_NEAR)


@pytest.mark.parametrize(
    ("kind", "sinks", "more"), [("dynamic", 4, ()), ("dynamic", 2, (3, 15)), ("static", 2, (3, 15))]
)
def test_generate_gives_the_same_tokens_with_and_without_cache(
    kind: str, sinks: int, more: tuple[int, ...]
) -> None:
    """Left padding, beams and chunks of a prompt, with one window and with three."""
    model = _hybrid(sinks)
    if more:
        choices = np.random.default_rng(0).integers(0, 4, (LAYERS, KV_HEADS))
        windows = [Window(size, sinks) for size in (WINDOW, *more)]
        model = materialize(small_model(), of_choices(choices, windows))
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    cached: dict[str, Any] = {"cache_implementation": "static"} if kind == "static" else {}
    for beams in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **beams}
        expected = model.generate(ids, use_cache=False, **options)
        for chunks in ({}, {"prefill_chunk_size": 6}):
            output = model.generate(
                ids, return_dict_in_generate=True, **options, **cached, **chunks
            )
            assert torch.equal(output.sequences, expected)
            cache = output.past_key_values
            assert isinstance(cache.layers[0], HeadGroupsLayer)
            assert cache.is_compileable == (kind == "static")


@pytest.mark.parametrize("draft", ["model", "hybrid", "prompt"])
def test_assisted_generation_is_exact(draft: str) -> None:
    """`crop` takes the draft back at almost every step, also from the assistant's cache."""
    model, ids = _hybrid(4), tokens(1, 20)
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    other = small_model(seed=5)
    drafts: dict[str, Any] = {
        "model": {"assistant_model": other},
        "hybrid": {"assistant_model": materialize(other, random_mask(Window(WINDOW, 2), 1))},
        "prompt": {"prompt_lookup_num_tokens": 3},
    }
    assisted = model.generate(ids, max_new_tokens=12, do_sample=False, **drafts[draft])
    assert torch.equal(alone, assisted)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("recorded", [True, False])
def test_crop_equals_transformers_own_at_every_length(sinks: int, recorded: bool) -> None:
    """It leaves what a DynamicCache leaves, or is refused if tokens are gone."""
    layout, past = full_first(1, 3, Window(4, sinks)), 3
    for length in range(13):
        states = torch.arange(length).float().expand(1, 3, 2, length).transpose(2, 3).contiguous()
        for removed in range(length + 4):
            own, cache = DynamicCache(), HybridCache([layout])
            if recorded:
                cache.activate_past_recording()
            for one in states.split(5, dim=2):
                own.update(one, one, 0)
                keys, _ = cache.update(one, one, 0)
                keys.done(AttentionContext(one.shape[2], cache.get_seq_length() - one.shape[2]))
            own.crop(-removed)
            left = own.get_seq_length()
            if not recorded and removed and left > 0 and length > past + sinks:
                with pytest.raises(RuntimeError, match="activate_past_recording"):
                    cache.crop(-removed)
                continue
            cache.crop(-removed)
            assert cache.get_seq_length() == left
            if left:
                full, sliding = cache.layers[0].parts
                assert torch.equal(full.keys, own.layers[0].keys[:, :1])
                first = max(0, left - past) if left > past + sinks else 0
                held = [*range(min(first, sinks)), *range(first, left)]
                assert torch.equal(sliding.keys, own.layers[0].keys[:, 1:, held])


@pytest.mark.parametrize(
    "family, recorded, static, says",
    [
        ("qwen3", False, False, "activate_past_recording"),
        ("qwen3", False, True, "use the dynamic cache"),
        ("lfm2", False, False, "nor from others without activate_past"),
        ("qwen3_next", True, False, "recurrent states"),
        ("falcon_h1", True, True, "recurrent states"),
    ],
)
def test_a_refused_crop_changes_no_layer(
    family: str, recorded: bool, static: bool, says: str
) -> None:
    """Although the first layer, all full, could take tokens back.

    Cropping to 0 tokens always works, and the cache then takes another text.
    """
    base, ids = small_model(family), tokens(1, 14)
    is_full = mask_of(base.config, Window(4, 2)).is_full
    is_full[0] = True
    model = materialize(base, HeadMask.of(is_full, Window(4, 2)))
    cache = model.new_static_cache(14) if static else model.new_cache()
    if recorded:
        cache.activate_past_recording()
    whole = model(ids, use_cache=False).logits
    model(ids[:, :9], past_key_values=cache)
    with pytest.raises(RuntimeError, match=says):
        cache.crop(-2)
    rest = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 9:], **_NEAR)
    cache.crop(-20)
    other = tokens(1, 14, seed=9)
    again = [model(part, past_key_values=cache).logits for part in other.split(8, dim=1)]
    whole = model(other, use_cache=False).logits
    torch.testing.assert_close(torch.cat(again, dim=1), whole, **_NEAR)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_the_caches_have_every_member_of_transformers_own(family: str) -> None:
    """Every public method and attribute that `generate` and other libraries may use."""
    # Names that only transformers' static layers use themselves.
    inner = {"cumulative_length", "k_head_dim", "num_heads", "v_head_dim"}

    def public(owner: Any) -> set[str]:
        return {name for name in dir(owner) if not name.startswith("_")}

    base, ids = small_model(family), tokens(1, 4)
    hybrid = materialize(base, random_mask(Window(WINDOW)))
    pairs = (
        (DynamicCache(config=base.config), hybrid.new_cache()),
        (StaticCache(config=base.config, max_cache_len=8), hybrid.new_static_cache(8)),
    )
    for theirs, ours in pairs:
        base(ids, past_key_values=theirs)
        hybrid(ids, past_key_values=ours)
        assert public(theirs) <= public(ours)
        for layer, own in zip(theirs.layers, ours.layers, strict=True):
            assert public(layer) - inner <= public(own)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_rows_can_be_reordered_and_layers_moved_to_the_host(kind: str) -> None:
    """As other libraries do, layer by layer; compiled code knows the places of a static cache."""
    model, ids = _hybrid(2), tokens(2, 20)
    cache = model.new_cache() if kind == "dynamic" else model.new_static_cache(20)
    model(ids[:, :15], past_key_values=cache)
    parts = [part for layer in cache.layers for part in layer.parts]
    places = [x.data_ptr() for part in parts for x in (part.keys, part.values)]
    for layer in cache.layers if kind == "dynamic" else ():
        layer.batch_repeat_interleave(2)
        layer.offload()
        layer.prefetch()
        layer.batch_select_indices(torch.tensor([3, 0]))
    if kind == "static":
        cache.reorder_cache(torch.tensor([1, 0]))
        assert places == [x.data_ptr() for part in parts for x in (part.keys, part.values)]
    logits = model(ids[:, 15:].flip(0), past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits, whole[:, 15:].flip(0), **_NEAR)
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, whole)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "lfm2"])
def test_a_cache_can_be_reset_and_take_another_batch_size(family: str) -> None:
    base, ids = small_model(family), tokens(2, 20)
    model = materialize(base, mask_of(base.config, Window(WINDOW, 2)))
    cache = model.new_cache()
    model(ids[:, :15], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    logits = model(ids[:, 15:].flip(0), past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits[:, 15:].flip(0)
    torch.testing.assert_close(logits, whole, **_NEAR)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(
        part.keys is not None for layer in cache.layers for part in getattr(layer, "parts", [])
    )
    torch.testing.assert_close(
        model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits
    )


def _one_layer(sinks: int) -> Any:
    """A single layer, because compiling takes seconds for each layer."""
    model = small_model(num_hidden_layers=1)
    return materialize(model, random_mask(Window(WINDOW, sinks), layers=1))


def _in_chunks(forward: Any, cache: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    parts = ids.split(sizes, dim=1)
    logits = [forward(input_ids=part, past_key_values=cache).logits for part in parts]
    assert int(cache.get_seq_length()) == ids.shape[1]
    return torch.cat(logits, dim=1)


def test_decoding_compiles_once_without_a_graph_break() -> None:
    """Over two calls of different lengths, the longer one first.

    The ring wraps around in the same graph, and in padded rows sinks arrive meanwhile.
    """
    model = _one_layer(4)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 13):
            ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
            mask[1, : length - 2] = 0
            options = {
                "attention_mask": mask, "max_new_tokens": 8, "do_sample": False,
                "output_logits": True, "return_dict_in_generate": True,
            }  # fmt: skip
            output, expected = (
                model.generate(ids, **options, **more)
                for more in (
                    {"cache_implementation": "static", "compile_config": compiling},
                    {"use_cache": False},
                )
            )
            assert torch.equal(output.sequences, expected.sequences)
            torch.testing.assert_close(output.logits, expected.logits, **_NEAR)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_generate_compiles_prompt_chunks_once_and_steps_once() -> None:
    model, ids = _one_layer(4), tokens(2, 24)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 3, "do_sample": False}
    result = model.generate(
        ids, cache_implementation="static", compile_config=compiling, prefill_chunk_size=8,
        **options,
    )  # fmt: skip
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert torch.equal(result, model.generate(ids, **options))


@pytest.mark.parametrize(
    ("family", "sizes"), [("gemma3", [12, 5, *[1] * 13]), ("qwen3", [1] * LENGTH)]
)
def test_transformers_static_cache_is_exact_in_both_modes(family: str, sizes: list[int]) -> None:
    """It holds every token of every head; the mask of its first pass may cover its whole length."""
    searched, ids = small_model(family), tokens(2, LENGTH)
    mask = mask_of(searched.config, Window(WINDOW, 4))
    hybrid = materialize(searched, mask)
    apply_head_mask(searched, mask)
    for model in (hybrid, searched):
        expected = model(ids, use_cache=False).logits
        for backend in ("sdpa", "eager"):
            if model is hybrid:
                hybrid.set_attn_implementation(backend)
            for options in ({}, {"attention_mask": torch.ones_like(ids)}):
                cache = StaticCache(model.config, LENGTH)
                result = _in_chunks(functools.partial(model, **options), cache, ids, sizes)
                torch.testing.assert_close(result, expected, **_NEAR)
    options = {"max_new_tokens": 6, "do_sample": False}
    generated = [
        m.generate(ids, cache_implementation="static", **options) for m in (hybrid, searched)
    ]
    assert torch.equal(*generated)


def test_crop_is_exact_until_the_ring_wraps_around_and_refused_after() -> None:
    model, ids = _hybrid(2), tokens(1, 20)
    cache = model.new_static_cache(20)
    assert not cache.is_croppable  # transformers crops one token before the stop
    model(ids[:, :3], past_key_values=cache)
    model(tokens(1, 3, seed=9), past_key_values=cache)
    cache.crop(-3)
    rest = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((3, 4), (4, 5), (5, 20))]
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 3:], **_NEAR)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"of 20 .* hold the last few; use the dynamic"):
        cache.crop(-1)
    assert int(cache.get_seq_length()) == 20
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)
    for layer, removed in zip(cache.layers, (20, 99), strict=False):
        layer.crop(-removed)
        assert int(layer.get_seq_length()) == 0


@pytest.mark.parametrize("full", [0, 1])
def test_tokens_beyond_the_end_of_a_static_cache_are_refused(full: int) -> None:
    """Also if all heads slide: their ring has room, but no mask would show the token."""
    layer = HeadGroupsLayer(full_first(full, 2, Window(4)), 10)
    first, rest, last = torch.zeros(1, 2, 12, 4).split([8, 3, 1], dim=2)
    layer.update(first, first)
    layer.update(rest[:, :, :2], rest[:, :, :2])
    with pytest.raises(IndexError, match="out of"):
        layer.update(rest, rest)
    with pytest.raises(IndexError, match="out of"):
        layer.update(last, last)


@pytest.mark.parametrize("room", [None, 10])
@pytest.mark.parametrize("before", [0, 1])
def test_states_of_another_number_of_heads_are_refused(room: int | None, before: int) -> None:
    """As if heads were split over processes; in the first pass and later."""
    for heads in (1, 2, 5):
        cache, states = HybridCache([full_first(1, 4, Window(4))], room), torch.zeros(1, 4, 3, 4)
        for _ in range(before):
            cache.update(states, states, 0)
        other = torch.zeros(1, heads, 3, 4)
        with pytest.raises(ValueError, match=f"4 KV heads and would get states of {heads}"):
            cache.update(other, other, 0)
        assert cache.get_seq_length() == 3 * before


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_filled_cache_of_transformers_keeps_its_states(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The original reads the prompt, its hybrid with full heads continues, with a warning."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    original, ids = small_model(), tokens(2, LENGTH)
    expected = original(ids).logits[:, 12:]
    cache = StaticCache(original.config, LENGTH) if kind == "static" else DynamicCache()
    original(ids[:, :12], past_key_values=cache)
    hybrid = materialize(small_model(), HeadMask.all_full(LAYERS, KV_HEADS))
    layers = cache.layers
    result = hybrid(ids[:, 12:], past_key_values=cache).logits
    assert cache.layers is layers
    assert "keep all tokens and save no memory" in capfd.readouterr().err + caplog.text
    torch.testing.assert_close(result, expected, **_NEAR)


def test_a_cache_of_transformers_that_records_the_past_still_does_as_a_hybrids() -> None:
    model, ids = small_model("ministral"), tokens(2, LENGTH)
    hybrid = materialize(model, mask_of(model.config, Window(WINDOW)))
    cache = DynamicCache(config=hybrid.config)
    cache.activate_past_recording()
    hybrid(ids, past_key_values=cache)
    cache.crop(-12)
    again = hybrid(ids[:, -12:], past_key_values=cache).logits
    torch.testing.assert_close(again, hybrid(ids, use_cache=False).logits[:, -12:], **_NEAR)


def test_an_offloaded_cache_is_not_cut_after_attention() -> None:
    """The copies on the host might not be complete yet."""
    config = small_model().config
    for cache in (StaticCache(config, LENGTH), DynamicCache()):
        cache.offloading, layers = True, cache.layers  # its constructor wants a GPU
        adopt_cache(_hybrid(0), cache)
        assert cache.layers is layers


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_mask_for_a_static_cache_has_either_of_its_names(name: str) -> None:
    layers = [SimpleNamespace(max_cache_len=6)]
    cache = SimpleNamespace(get_seq_length=lambda: torch.tensor(3), layers=layers)
    mask = torch.tensor([[0, 1, 1, 1]])
    padded = masks_for_generate(small_config(), torch.zeros(1, 1, 48), mask, **{name: cache})
    assert padded.tolist() == [[False, True, True, True, True, True]]


def test_a_static_cache_works_with_states_in_search_mode() -> None:
    model, ids = small_model("falcon_h1"), tokens(2, 9)
    apply_head_mask(model, mask_of(model.config, Window(WINDOW)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    text = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(text, model.generate(ids, use_cache=False, **options))
