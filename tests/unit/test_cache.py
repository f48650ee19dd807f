"""HybridCache: what it holds, and that decoding with it equals computing everything again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache

from bosch.attention import AttentionContext, HeadLayout
from bosch.heads import HeadMask
from bosch.model.cache import HybridCache, HybridCacheLayer
from bosch.model.cache_size import CacheSize
from bosch.model.families import DecoderLayers
from bosch.model.materialize import materialize
from bosch.model.static_cache import StaticHybridCache
from bosch.window import Window
from tests.attention_case import full_first
from tests.hybrid_case import mask_of, random_mask, small_model, tokens

WINDOW = 6


def _hybrid(sinks: int) -> Any:
    return materialize(small_model(), random_mask(), Window(WINDOW, sinks))


def _most_of_windows(layer: Any) -> int:
    """Most tokens that a sliding head of a layer's cache holds."""
    sliding = [cached for cached in layer.groups if cached.group.window is not None]
    return max((cached.keys.shape[2] for cached in sliding), default=0)


def _in_chunks(model: Any, ids: torch.Tensor, sizes: list[int], **kwargs: Any) -> torch.Tensor:
    cache, outputs, start = model.new_cache(), [], 0
    mask = kwargs.get("attention_mask")
    for size in sizes:
        part = {"input_ids": ids[:, start : start + size], "past_key_values": cache}
        if mask is not None:
            part["attention_mask"] = mask[:, : start + size]
            part["position_ids"] = kwargs["position_ids"][:, start : start + size]
        outputs.append(model(**part).logits)
        start += size
        for layer in cache.hybrid_layers:
            assert _most_of_windows(layer) <= WINDOW - 1
    assert start == ids.shape[1]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("sizes", [[30], [20] + [1] * 10, [2, 5, 1, 6, 8, 1, 7]])
def test_left_padding_equals_each_row_alone(sinks: int, sizes: list[int]) -> None:
    """Also where a row starts long after the first chunk: its sinks are its own first tokens."""
    model, ids = _hybrid(sinks), tokens(3, 30)
    pads = [0, 4, 17]
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = _in_chunks(model, ids, sizes, attention_mask=mask, position_ids=positions)
    for row, pad in enumerate(pads):
        alone = model(ids[row : row + 1, pad:], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, pad:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 1, 4, 40])
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 40])
@pytest.mark.parametrize(
    "counts", [((0, 0), (1, 0), (4, 0)), ((1, 2), (0, 1), (0, 4))], ids=["one window", "two"]
)
def test_the_formula_is_what_the_caches_hold(
    sinks: int, length: int, counts: tuple[tuple[int, int], ...]
) -> None:
    heads, batch, dim = 4, 2, 8
    narrow, wide = Window(WINDOW, sinks), Window(2 * WINDOW, sinks)
    rows = [{None: full, wide: wider, narrow: 4 - full - wider} for full, wider in counts]
    size = CacheSize.of(rows, DecoderLayers(3, (0, 1, 2), heads, dim), 2, state_bytes=0)
    layouts = [HeadLayout.deploy(row) for row in rows]
    states = torch.zeros(batch, heads, length, dim, dtype=torch.bfloat16)
    dynamic, static = HybridCache(layouts), StaticHybridCache(layouts, length)
    for layer in range(len(rows)):
        keys, _ = dynamic.update(states.clone(), states.clone(), layer)
        keys.settle(AttentionContext(length))
        static.update(states.clone(), states.clone(), layer)
    assert dynamic.num_bytes == batch * size.dynamic(length)
    assert static.num_bytes == batch * size.static(length)
    if length < WINDOW:
        assert size.dynamic(length) == size.original(length)


def test_prefill_is_freed_not_only_sliced_off() -> None:
    """The storage of the prompt's keys must be gone while the cache lives."""
    layer = HybridCacheLayer(full_first(1, 4, Window(16)))
    keys, values = torch.zeros(1, 4, 1000, 8), torch.zeros(1, 4, 1000, 8)
    layer.update(keys, values)
    layer.settle(AttentionContext(1000))
    gc.collect()
    assert layer.num_bytes == 2 * 4 * 8 * (1000 + 3 * 15)
    assert layer.groups[1].keys.untyped_storage().nbytes() == 3 * 15 * 8 * 4


def test_chunked_prefill_needs_no_more_for_a_longer_prompt() -> None:
    """At no time do sliding heads hold more than the window, the sinks and one chunk."""
    layout, chunk, sinks = full_first(0, 4, Window(16, 3)), 32, 3
    entry = 2 * 4 * 8 * 4  # bytes of keys and values: heads, dimensions, float32
    peaks = []
    for length in (128, 1024):
        layer, lengths = HybridCacheLayer(layout), []
        for start in range(0, length, chunk):
            states = torch.zeros(1, 4, chunk, 8)
            keys, _ = layer.update(states, states.clone())
            lengths.append(layer.num_bytes)
            keys.settle(AttentionContext(chunk, start))
            lengths.append(layer.num_bytes)
        assert lengths[-1] == entry * (16 - 1 + sinks)
        peaks.append(max(lengths))
    assert peaks == [entry * (16 - 1 + sinks + chunk)] * 2


@pytest.mark.parametrize(("sinks", "more"), [(0, ()), (4, ()), (2, (3, 15))])
def test_generate_equals_generate_without_cache(sinks: int, more: tuple[int, ...]) -> None:
    """Left padding, beams and chunks of a prompt, with one window and with three."""
    model = _hybrid(sinks)
    if more:
        choices = np.random.default_rng(0).integers(0, 4, random_mask().is_full.shape)
        windows = [Window(size, sinks) for size in (WINDOW, *more)]
        model = materialize(small_model(), HeadMask.of_choices(choices), windows)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    chunked = {"prefill_chunk_size": 6}
    for options in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, chunked):
        generated = [
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                use_cache=use,
                **(options if use or options is not chunked else {}),
            )
            for use in (True, False)
        ]
        assert torch.equal(*generated)


def test_generate_uses_and_returns_the_hybrid_cache() -> None:
    model = _hybrid(0)
    generated = model.generate(
        tokens(1, 20), max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    assert isinstance(generated.past_key_values, HybridCache)
    assert max(_most_of_windows(x) for x in generated.past_key_values.hybrid_layers) == WINDOW - 1
    assert isinstance(model(tokens(1, 5), use_cache=True).past_key_values, HybridCache)


@pytest.mark.parametrize("draft", ["model", "hybrid", "prompt"])
def test_assisted_generation_is_exact(draft: str) -> None:
    """The draft is taken back by `crop` at almost every step, from its writer's cache too."""
    model, ids = _hybrid(4), tokens(1, 20)
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    other = small_model(seed=5)
    drafts: dict[str, Any] = {
        "model": {"assistant_model": other},
        "hybrid": {"assistant_model": materialize(other, random_mask(1), Window(WINDOW, 2))},
        "prompt": {"prompt_lookup_num_tokens": 3},
    }
    assisted = model.generate(ids, max_new_tokens=12, do_sample=False, **drafts[draft])
    assert torch.equal(alone, assisted)


def test_crop_takes_back_what_was_recorded_and_refuses_what_was_not() -> None:
    model, ids = _hybrid(2), tokens(1, 30)
    whole = model(ids, use_cache=False).logits
    cache = model.new_cache()
    cache.activate_past_recording()
    model(ids[:, :20], past_key_values=cache)
    model(tokens(1, 5, seed=9), past_key_values=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 20
    rest = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-5)
    forgetful = model.new_cache()
    model(ids[:, : WINDOW - 2], past_key_values=forgetful)
    model(tokens(1, 1, seed=9), past_key_values=forgetful)
    forgetful.crop(-1)  # nothing has left the window yet
    rest = model(ids[:, WINDOW - 2 :], past_key_values=forgetful).logits
    torch.testing.assert_close(rest, whole[:, WINDOW - 2 :], rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        forgetful.crop(-3)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("recorded", [True, False])
def test_crop_equals_transformers_own_at_every_length(sinks: int, recorded: bool) -> None:
    """What is left is what a DynamicCache leaves, or a refusal where tokens are gone."""
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
                keys.settle(AttentionContext(one.shape[2], cache.get_seq_length() - one.shape[2]))
            own.crop(-removed)
            left = own.get_seq_length()
            if not recorded and removed and left > 0 and length > past:
                with pytest.raises(RuntimeError, match="activate_past_recording"):
                    cache.crop(-removed)
                continue
            cache.crop(-removed)
            layer = cache.hybrid_layers[0]
            assert cache.get_seq_length() == left
            if left:
                full, sliding = layer.groups
                assert torch.equal(full.keys, own.layers[0].keys[:, :1])
                recent = own.layers[0].keys[:, 1:, max(0, left - past) :]
                assert torch.equal(sliding.keys, recent)
                assert (sliding.sink_keys is not None) == bool(sinks and left > past)


def test_sinks_that_come_once_the_window_is_full() -> None:
    layer = HybridCacheLayer(full_first(0, 1, Window(2, 4)))
    for number in range(7):
        states = torch.full((1, 1, 1, 1), float(number))
        layer.update(states, states)
        layer.settle(AttentionContext(1, number))
    assert layer.groups[0].sink_keys.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_cache_cropped_to_nothing_takes_another_text(sinks: int) -> None:
    model, ids = _hybrid(sinks), tokens(1, 20)
    expected = model(ids, use_cache=False).logits
    for cache in (model.new_cache(), model.new_static_cache(30)):
        model(tokens(1, 20, seed=9), past_key_values=cache)
        cache.crop(-20)
        parts = [model(part, past_key_values=cache).logits for part in ids.split(8, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()  # transformers empties states in place
@pytest.mark.parametrize(
    "family, recorded, static, says",
    [
        ("qwen3", False, False, "activate_past_recording"),
        ("qwen3", False, True, "use the dynamic cache"),
        ("lfm2", False, False, "does not track past states"),
        ("qwen3_next", True, False, "recurrent states"),
        ("falcon_h1", True, True, "recurrent states"),
    ],
)
def test_a_refused_crop_changes_no_layer(
    family: str, recorded: bool, static: bool, says: str
) -> None:
    """Though the first layer, all full, could take tokens back; and all tokens always can be."""
    base, ids = small_model(family), tokens(1, 14)
    is_full = mask_of(base.config).is_full.copy()
    is_full[0] = True
    model = materialize(base, HeadMask(is_full), Window(4))
    cache = model.new_static_cache(14) if static else model.new_cache()
    if recorded:
        cache.activate_past_recording()
    whole = model(ids, use_cache=False).logits
    model(ids[:, :9], past_key_values=cache)
    with pytest.raises(RuntimeError, match=says):
        cache.crop(-2)
    rest = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 9:], rtol=1e-4, atol=1e-5)
    cache.crop(-20)
    again = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_the_caches_have_what_transformers_own_have(family: str) -> None:
    """Every public method and attribute, which `generate` and other libraries may ask for."""
    # How transformers' static layers keep their tensors, read by themselves alone.
    inner = {"cumulative_length", "k_head_dim", "num_heads", "v_head_dim"}

    def public(owner: Any) -> set[str]:
        return {name for name in dir(owner) if not name.startswith("_")}

    base, ids = small_model(family), tokens(1, 4)
    hybrid = materialize(base, random_mask(), Window(WINDOW))
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
        assert ours.max_cache_len == ours.get_max_length()


@torch.no_grad()
def test_layers_change_their_rows_and_come_back_from_the_host() -> None:
    """As other libraries ask of transformers' own layers, one by one."""
    model, ids = _hybrid(2), tokens(2, 20)
    cache = model.new_cache()
    model(ids[:, :15], past_key_values=cache)
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
        layer.offload()
        layer.prefetch()
        layer.batch_select_indices(torch.tensor([3, 0]))
    logits = model(ids[:, 15:].flip(0), past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits[:, 15:].flip(0)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "lfm2"])
def test_reset_and_batch_changes(family: str) -> None:
    base, ids = small_model(family), tokens(2, 20)
    model = materialize(base, mask_of(base.config), Window(WINDOW, 2))
    cache = model.new_cache()
    model(ids[:, :15], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    logits = model(ids[:, 15:].flip(0), past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits[:, 15:].flip(0)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(layer.groups for layer in cache.hybrid_layers)
    torch.testing.assert_close(
        model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits
    )
