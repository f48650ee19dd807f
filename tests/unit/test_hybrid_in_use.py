"""A hybrid model as people use any: own loops, caches, attention weights, AutoModel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from bosch.errors import UserError
from bosch.model.cache import HybridCache, HybridCacheLayer
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.static_cache import StaticHybridCacheLayer
from bosch.window import Window
from tests.hybrid_case import LAYERS, mask_of, random_mask, small_model, tokens

WINDOW, SINKS, LENGTH = 6, 2, 20
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return materialize(small_model(), random_mask(), Window(WINDOW, SINKS))


@pytest.fixture(scope="module")
def folder(hybrid: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    hybrid.save_pretrained(path)
    return path


def _whole(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("by_position", [False, True])
def test_a_loop_with_positions_and_no_mask(hybrid: Any, by_position: bool) -> None:
    """Greedy decoding as somebody writes it who knows transformers alone."""
    ids = tokens(2, LENGTH)
    expected = hybrid.generate(ids, max_new_tokens=8, do_sample=False)
    past, step, text = None, ids, ids
    with torch.inference_mode():
        for _ in range(8):
            positions = torch.arange(text.shape[1] - step.shape[1], text.shape[1])[None]
            arguments = (step, None, positions) if by_position else (step,)
            named = {} if by_position else {"position_ids": positions}
            out = hybrid(*arguments, past_key_values=past, **named)
            past, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            text = torch.cat([text, step], dim=1)
    assert isinstance(past, HybridCache)
    assert torch.equal(text, expected)


def test_packed_rows_get_no_cache_and_a_wish_for_one_is_refused(hybrid: Any) -> None:
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    assert hybrid(tokens(1, LENGTH), position_ids=packed).past_key_values is None
    for options in ({"use_cache": True}, {"past_key_values": DynamicCache()}):
        with pytest.raises(ValueError, match="packed documents are not kept apart in a pass with"):
            hybrid(tokens(1, LENGTH), position_ids=packed, **options)


def test_training_makes_no_cache(hybrid: Any) -> None:
    hybrid.train()
    try:
        assert hybrid(tokens(1, LENGTH)).past_key_values is None
    finally:
        hybrid.eval()


def _user_caches(model: Any) -> list[Any]:
    return [
        DynamicCache(config=model.config),
        DynamicCache(),
        StaticCache(model.config, max_cache_len=LENGTH),
    ]


@pytest.mark.parametrize("number", range(3))
def test_an_empty_cache_of_transformers_saves_what_a_hybrid_one_does(
    hybrid: Any, number: int
) -> None:
    cache, ids = _user_caches(hybrid)[number], tokens(2, LENGTH)
    parts = [hybrid(ids[:, a:b], past_key_values=cache) for a, b in ((0, 12), (12, 19), (19, 20))]
    torch.testing.assert_close(
        torch.cat([part.logits for part in parts], dim=1), _whole(hybrid, ids), **_NEAR
    )
    assert all(part.past_key_values is cache for part in parts) and len(cache) == LAYERS
    kind = StaticHybridCacheLayer if number == 2 else HybridCacheLayer
    assert all(type(layer) is kind for layer in cache.layers)
    own = hybrid.new_static_cache(LENGTH) if number == 2 else hybrid.new_cache()
    hybrid(ids, past_key_values=own)
    assert sum(layer.num_bytes for layer in cache.layers) == own.num_bytes


@pytest.mark.parametrize("assisted", [False, True])
def test_generate_goes_on_with_a_cache_of_the_user(hybrid: Any, assisted: bool) -> None:
    """Assisted decoding takes tokens back, which the layers must have recorded."""
    ids, cache = tokens(1, LENGTH), DynamicCache(config=hybrid.config)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if assisted else {}
    expected = hybrid.generate(ids, max_new_tokens=8, do_sample=False)
    actual = hybrid.generate(
        ids, max_new_tokens=8, do_sample=False, past_key_values=cache, **options
    )
    assert torch.equal(actual, expected)
    assert all(isinstance(layer, HybridCacheLayer) for layer in cache.layers)


def test_an_empty_static_cache_of_the_user_where_layers_hold_states_too() -> None:
    base, ids = small_model("falcon_h1"), tokens(2, LENGTH)
    hybrid = materialize(base, mask_of(base.config), Window(7, 2))
    cache = StaticCache(config=hybrid.config, max_cache_len=LENGTH + 8)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = hybrid.generate(ids, **options)
    assert torch.equal(hybrid.generate(ids, past_key_values=cache, **options), expected)


@pytest.mark.parametrize("static", [False, True])
def test_attention_weights_with_eager(hybrid: Any, static: bool) -> None:
    """Of a pass, of chunks over a cache, and of `generate`: rows of one and the same matrix."""
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model = materialize(small_model(), random_mask(), Window(WINDOW, SINKS))
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "attention_mask": mask}
    with torch.inference_mode():
        whole = model(ids, use_cache=False, **options).attentions
        assert len(whole) == LAYERS and whole[0].shape == (2, 8, LENGTH, LENGTH)
        for weights, count in zip(whole, random_mask().full_kv_heads_per_layer, strict=True):
            real = weights[:, :, 4:]
            torch.testing.assert_close(real.sum(-1), torch.ones_like(real[..., 0]))
            far = weights[0, :, -1, SINKS : LENGTH - WINDOW]
            assert bool((far[2 * count :] == 0).all()) and bool((far[: 2 * count] > 0).all())
        cache = model.new_static_cache(LENGTH) if static else model.new_cache()
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            part = model(
                ids[:, start:stop], past_key_values=cache, output_attentions=True,
                attention_mask=mask[:, :stop],
            ).attentions  # fmt: skip
            for actual, expected in zip(part, whole, strict=True):
                rows = expected[:, :, start:stop, : actual.shape[3]]
                torch.testing.assert_close(actual[..., : rows.shape[3]], rows, **_NEAR)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=2, do_sample=False, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    torch.testing.assert_close(output.attentions[0], whole, **_NEAR)


def test_attention_weights_by_the_configuration(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_attentions=True
    )
    assert len(loaded(tokens(1, 5)).attentions) == LAYERS


def test_the_decoder_alone_by_auto_model(hybrid: Any, folder: Path, tmp_path: Path) -> None:
    decoder, ids = AutoModel.from_pretrained(folder), tokens(2, LENGTH)
    assert type(decoder).__name__ == "HybridQwen3Model"
    out = decoder(ids, torch.ones_like(ids))
    assert isinstance(out.past_key_values, HybridCache)
    expected = _whole(hybrid, ids)
    with torch.inference_mode():
        torch.testing.assert_close(hybrid.lm_head(out.last_hidden_state), expected, **_NEAR)
        rest = decoder(ids[:, :1], past_key_values=out.past_key_values).last_hidden_state
        expected = _whole(hybrid, torch.cat([ids, ids[:, :1]], dim=1))[:, -1:]
        torch.testing.assert_close(hybrid.lm_head(rest), expected, **_NEAR)
    decoder.save_pretrained(tmp_path)
    assert "AutoModel" in json.loads((tmp_path / "config.json").read_text())["auto_map"]
    again = AutoModel.from_pretrained(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).last_hidden_state, out.last_hidden_state, **_NEAR)


_ATTENTION = "model.layers.1.self_attn"


def _damaged(source: Path, target: Path, change: Any) -> Path:
    weights = load_file(source / "model.safetensors")
    change(weights)
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_sink_bias_that_config_json_has_lost_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its logits would be another model's, without a word."""
    _damaged(folder, tmp_path, lambda w: w.update({f"{_ATTENTION}.sink_bias": torch.ones(4)}))
    with pytest.raises(UserError, match=r"1 weights of the files have no place .*sink_bias"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "1 weights are missing or of"),
        (
            lambda w: w.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}),
            r"1 weights of the files have no place in the model of config\.json, model\.layers\.3",
        ),
        (
            lambda w: [w.update({f"language_model.{n}": w.pop(n)}) for n in list(w)],
            "weights are missing",
        ),
    ],
    ids=["missing", "unexpected", "renamed"],
)
def test_a_model_of_which_weights_would_be_random_is_refused(
    folder: Path, tmp_path: Path, change: Any, sentence: str, ordinary: bool
) -> None:
    """By whatever call; transformers alone would fill them with random numbers and a warning."""
    source = folder
    if ordinary:
        source = tmp_path / "base"
        small_model().save_pretrained(source)
    target = tmp_path / "damaged"
    target.mkdir()
    _damaged(source, target, change)
    with pytest.raises(UserError, match=sentence):
        load_model(target, dtype="float32")
    for auto in () if ordinary else (AutoModelForCausalLM, AutoModel):
        with pytest.raises(UserError, match=sentence):
            auto.from_pretrained(target)
