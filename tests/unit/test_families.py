"""Every family: search mode, deploy mode, a saved model and the oracle are the same function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from bosch.baselines.capture import visit_layers
from bosch.errors import UserError
from bosch.families import FAMILIES, base_windows, check_searchable, family_of
from bosch.heads import HeadMask
from bosch.modeling import (
    apply_head_mask,
    layouts_of,
    materialize,
    permute_heads,
    prepare_for_search,
)
from pipeline.modelinfo import ModelInfo
from tests.hybrid_case import (
    FAMILY_NAMES,
    KV_HEADS,
    LAYERS,
    OWN_WINDOW,
    PARTLY_SLIDING,
    random_mask,
    small_config,
    small_model,
    tokens,
)

WINDOW = 7
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def _greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False)


def test_every_family_is_tested() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_search_equals_oracle_equals_deploy_equals_saved(family: str, tmp_path: Path) -> None:
    model, ids, mask = small_model(family), tokens(2, 40), random_mask()
    sinks = 2 * (FAMILY_NAMES.index(family) % 2)
    model.set_attn_implementation("eager")  # transformers' sdpa leaves out Gemma 2's soft cap
    original, text = _logits(model, ids), _greedy(model, ids)
    prepare_for_search(model, "eager")
    torch.testing.assert_close(_logits(model, ids), original, **_NEAR)
    assert torch.equal(_greedy(model, ids), text)
    apply_head_mask(model, mask, WINDOW, sinks)
    oracle = _logits(model, ids)
    assert (oracle - original).abs().max() > 0.05
    prepare_for_search(model, "sdpa")
    apply_head_mask(model, mask, WINDOW, sinks)
    torch.testing.assert_close(_logits(model, ids), oracle, **_NEAR)

    hybrid = materialize(model, mask, WINDOW, sinks)
    torch.testing.assert_close(_logits(hybrid, ids), oracle, **_NEAR)
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(hybrid) and layouts_of(loaded) == layouts_of(hybrid)
    assert torch.equal(_logits(loaded, ids), _logits(hybrid, ids))
    text = _greedy(model, ids)
    assert torch.equal(_greedy(hybrid, ids), text) and torch.equal(_greedy(loaded, ids), text)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_permutation_alone_leaves_the_function(family: str) -> None:
    model, ids = small_model(family), tokens(2, 30)
    before, weights = _logits(model, ids), permute_heads(model, random_mask())
    moved = {n for n, w in model.state_dict().items() if not torch.equal(w, weights[n])}
    parts = {"qkv_proj"} if FAMILIES[family].fused else {"q_proj", "k_proj", "v_proj"}
    logits = FAMILIES[family].head_logits
    if logits:
        assert {n for n in moved if n.endswith(logits)} and logits not in parts
        moved = {n for n in moved if not n.endswith(logits)}
    norms = {"q_norm", "k_norm"} if FAMILIES[family].norms_over_heads else set()
    assert {n.split(".")[-2] for n in moved} == parts | norms | {"o_proj"}
    biases = {n for n in weights if n.split(".")[-2] in parts and n.endswith(".bias")}
    assert biases <= moved
    model.load_state_dict(weights)
    torch.testing.assert_close(_logits(model, ids), before, **_NEAR)


@pytest.mark.parametrize("family", PARTLY_SLIDING)
def test_layers_that_slide_in_the_base_model_keep_their_own_window(family: str) -> None:
    model, ids = small_model(family), tokens(2, 40)
    window, own = OWN_WINDOW["sliding_window"], OWN_WINDOW["layer_types"].index("sliding_attention")
    assert base_windows(model.config) == [window if n == own else None for n in range(LAYERS)]
    model.set_attn_implementation("eager")
    original, text = _logits(model, ids), _greedy(model, ids)
    full = materialize(model, HeadMask.all_full(LAYERS, KV_HEADS), WINDOW, 2)
    torch.testing.assert_close(_logits(full, ids), original, **_NEAR)
    cache = full.new_cache()
    made = full.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(made, text)
    for number, layer in enumerate(cache.hybrid_layers):
        held = window - 1 if number == own else ids.shape[1] + 5
        assert (layer.recent_keys if number == own else layer.full_keys).shape[2] == held
    assert full.config.hybrid_attention["full_kv_heads_per_layer"][own] == 0
    with pytest.raises(UserError, match=r"window_size is 4, .* layer 1 .* at least 5"):
        materialize(model, random_mask(), window - 1)
    with pytest.raises(UserError, match=rf"'{family}', because 1 of its layers, layer 1 first"):
        check_searchable(model.config)
    with pytest.raises(UserError, match=r"heads are not searched in this model"):
        visit_layers(model, ids[0], lambda layer, states: None)


def test_a_hybrid_whose_base_layers_slide_cannot_have_full_heads_there() -> None:
    config = materialize(small_model("olmo3"), random_mask(), WINDOW).config
    config.hybrid_attention["full_kv_heads_per_layer"][1] = 2
    with pytest.raises(UserError, match=r"is 2 for layer 1, which slides .* expected 0"):
        AutoModelForCausalLM.from_config(config)


def _refusal(check: Callable[[], None]) -> str | None:
    try:
        check()
    except UserError as fault:
        return str(fault)
    return None


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_config_json_alone_tells_what_the_loaded_config_does(family: str) -> None:
    """Also with what older files lack: layer_types, which the config class then makes."""
    for config in (small_config(family), AutoConfig.for_model(family, num_hidden_layers=8)):
        told = _refusal(lambda config=config: check_searchable(config))
        content = json.loads(config.to_json_string())
        assert _refusal(ModelInfo(None, None, content).check_family) == told
        assert (told is not None) == (config.num_hidden_layers == 8 and family == "mistral") or (
            family in PARTLY_SLIDING
        )
    content.pop("layer_types", None)
    assert _refusal(ModelInfo(None, None, content).check_family) == told


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("vaultgemma", "caps attention scores"),
        ("gemma3", "takes more than text"),
        ("granite_swa", "learned logit"),
        ("deepseek_v3", "latent attention"),
        ("qwen3_next", "linear_attention"),
        ("llama4_text", "chunked_attention"),
        ("falcon_h1", "not supported"),
        ("bert", "not supported"),
    ],
)
def test_unsupported_families_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"'{model_type}'.*{reason}.*supported are .*qwen3"):
        family_of(AutoConfig.for_model(model_type))


def test_every_other_model_of_transformers_is_refused_by_name() -> None:
    for model_type in set(CONFIG_MAPPING) - set(FAMILIES):
        if not model_type.startswith("hybrid_"):
            with pytest.raises(UserError, match=f"'{model_type}' are not supported"):
                family_of(type("Config", (), {"model_type": model_type})())


def test_supported_families_with_what_they_cannot_have_are_refused() -> None:
    with pytest.raises(UserError, match=r"'gemma3_text'.*caps attention scores"):
        family_of(small_config("gemma3_text", attn_logit_softcapping=50.0))
    with pytest.raises(UserError, match=r"'gemma3_text'.*not causal"):
        family_of(small_config("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UserError, match="window of its own"):
        family_of(small_config("olmo3", layer_types=["sliding_attention"] * LAYERS))
