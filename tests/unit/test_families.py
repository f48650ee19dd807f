"""Every family: search mode, deploy mode, a saved model and the oracle are the same function."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model import configuration
from bosch.model.cache import held_bytes, state_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import FAMILIES, attention_needs, decoder_layers, family_of, known_family
from bosch.model.interface import attention_module, layouts_of
from bosch.model.loading import load_model
from bosch.model.materialize import materialize, permute_heads
from bosch.model.registration import register_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.model.stored_config import StoredConfig
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.flops import Flops
from bosch.window import Window
from tests.hybrid_case import (
    FAMILY_NAMES,
    LAYERS,
    TESTED,
    logits_of,
    mask_of,
    small_config,
    small_model,
    tokens,
)

WINDOW = 7
TEXT_ONLY = tuple(name for name in CONFIG_MAPPING if name.endswith("_vl_text"))
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


def _greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=3, do_sample=False)


def test_every_family_is_tested() -> None:
    whole = {name for name, family in FAMILIES.items() if not family.is_part}
    # An older transformers lacks the newest ones.
    assert set(FAMILY_NAMES) == whole & CONFIG_MAPPING_NAMES.keys()


@pytest.mark.parametrize("family", TESTED)
def test_search_oracle_deploy_and_saved_model_agree(family: str, tmp_path: Path) -> None:
    """Every other family with sinks, every other two with three windows."""
    model, ids = small_model(family), tokens(2, 40)
    several, with_sinks = divmod(FAMILY_NAMES.index(family) % 4, 2)
    mask, windows = mask_of(model.config), [Window(WINDOW, 2 * with_sinks)]
    if several:
        windows = [Window(size, 2 * with_sinks) for size in (9, 4, 17)]
        in_order = np.tile(np.arange(mask.num_key_value_heads) % 4, (mask.num_layers, 1))
        mask = HeadMask.of_choices(np.random.default_rng(1).permuted(in_order, axis=1))
    model.set_attn_implementation("eager")  # transformers' sdpa ignores Gemma 2's soft cap
    original, text = logits_of(model, ids), _greedy(model, ids)
    with torch.inference_mode():
        weights = model(ids, use_cache=False, output_attentions=True).attentions
    prepare_for_search(model, "eager")
    torch.testing.assert_close(logits_of(model, ids), original, **_NEAR)
    with torch.inference_mode():
        same = model(ids, use_cache=False, output_attentions=True).attentions
    if family in ("granite_swa", "granitemoe_swa"):  # their own weights leave out the sinks
        same = tuple(own / own.sum(dim=-1, keepdim=True) for own in same)
    torch.testing.assert_close(same, weights, **_NEAR)
    assert torch.equal(_greedy(model, ids), text)
    apply_head_mask(model, mask, windows)
    oracle = logits_of(model, ids)
    assert (oracle - original).abs().max() > 0.05
    prepare_for_search(model, "sdpa")
    apply_head_mask(model, mask, windows)
    torch.testing.assert_close(logits_of(model, ids), oracle, **_NEAR)

    hybrid = materialize(model, mask, windows)
    trained = [[weight.requires_grad for weight in m.parameters()] for m in (model, hybrid)]
    assert trained[0] == trained[1]
    torch.testing.assert_close(logits_of(hybrid, ids), oracle, **_NEAR)
    with pytest.raises(UserError, match="sdpa backend computes no attention weights"):
        hybrid(ids, output_attentions=True)
    hybrid.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert type(loaded) is type(hybrid) and layouts_of(loaded) == layouts_of(hybrid)
    saved = hybrid.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())
    # Not bit for bit: some CPU kernels of mixtures of experts depend on how a weight is aligned.
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(hybrid, ids), **_NEAR)
    text = _greedy(model, ids)
    assert torch.equal(_greedy(hybrid, ids), text) and torch.equal(_greedy(loaded, ids), text)


@pytest.mark.parametrize("family", TESTED)
def test_planned_sizes_are_those_of_the_model(family: str) -> None:
    """All parameters, active ones and maps of each layer, in `plan` and in a built model."""
    model = small_model(family)
    shape, flops = DecoderShape.of(model.config), Flops(model, Window(4))
    parts = model.get_decoder(), model.get_output_embeddings()
    parameters = {id(p): p.numel() for part in parts for p in part.parameters()}
    assert shape.parameters == sum(parameters.values())
    assert shape.active_parameters == (flops.all_linear + flops.output_head) // 2
    layers = [sum(p.numel() for p in layer.parameters()) for layer in parts[0].layers]
    assert shape.layer_parameters == max(layers)
    assert shape.tables == shape.parameters - sum(layers)
    assert shape.kinds == decoder_layers(model.config)
    first = attention_module(model, shape.kinds.full[0])
    output = getattr(first, known_family(model.config).output)
    assert shape.query_size == output.in_features
    hybrid = materialize(model, mask_of(model.config), Window(WINDOW))
    assert DecoderShape.of(hybrid.config) == shape
    # Read from the hybrid's directory, whose config.json refuses the family's own class.
    stored = StoredConfig(json.loads(hybrid.config.to_json_string()))
    assert stored.kinds == shape.kinds
    assert DecoderShape.of(stored.of_transformers()) == shape


def test_a_model_with_its_own_code_has_the_sizes_of_its_family() -> None:
    config = small_config("qwen3")
    own = type("OwnConfig", (type(config),), {})(**config.to_dict())
    own.auto_map = {"AutoModelForCausalLM": "modeling.OwnModel"}
    assert DecoderShape.of(own) == DecoderShape.of(config)


def test_sizes_are_built_once_for_equal_configurations() -> None:
    model = small_model("qwen3_moe")
    shape = DecoderShape.of(model.config)
    assert DecoderShape.of(copy.deepcopy(model.config)) is shape
    model.config.intermediate_size *= 2
    model.config.moe_intermediate_size *= 2
    assert DecoderShape.of(model.config).parameters > shape.parameters


@pytest.mark.parametrize(
    ("family", "sizes", "width"),
    [
        ("qwen3", {"intermediate_size": 40}, 40),
        ("phi3", {"intermediate_size": 40}, 40),  # gate and up projections in one map
        ("qwen3_moe", {"moe_intermediate_size": 16}, 2 * 16),  # two experts of four
        ("qwen2_moe", {}, 2 * 16 + 16),  # and one expert for every token
        ("starcoder2", {"intermediate_size": 42}, 28),  # two maps instead of three
    ],
)
def test_the_width_of_an_mlp_is_that_of_a_tokens_experts(
    family: str, sizes: dict[str, Any], width: int
) -> None:
    assert DecoderShape.of(small_config(family, **sizes)).active_width == width


def test_layers_that_differ_have_the_sizes_of_the_largest() -> None:
    """Of four layers two are dense, whose MLP is larger than four experts and their router."""
    sizes = {"intermediate_size": 80, "moe_intermediate_size": 16, "mlp_only_layers": [0, 2]}
    config = small_config("qwen3_moe", num_hidden_layers=4, **sizes)
    shape, hidden = DecoderShape.of(config), config.hidden_size
    model = AutoModelForCausalLM.from_config(config)
    dense, sparse = (
        sum(weight.numel() for weight in model.model.layers[index].parameters()) for index in (0, 1)
    )
    assert dense - sparse == 3 * 80 * hidden - (4 * 3 * 16 + 4) * hidden
    assert (shape.layer_parameters, shape.active_width) == (dense, 80)
    assert shape.experts == 4
    assert shape.tables == shape.parameters - 2 * (dense + sparse)
    assert shape.active_parameters == shape.parameters - 2 * 2 * 3 * 16 * hidden - (
        shape.tables - shape.table  # embeddings and norms
    ) - sum(p.numel() for n, p in model.model.layers.named_parameters() if p.ndim == 1)


@pytest.mark.parametrize("family", TESTED)
def test_permuting_heads_alone_keeps_the_function(family: str) -> None:
    model, ids = small_model(family), tokens(2, 30)
    before = logits_of(model, ids)
    weights = dict(permute_heads(model, mask_of(model.config).head_order()))
    moved = {n for n, w in model.state_dict().items() if not torch.equal(w, weights[n])}
    facts = known_family(model.config)
    parts = {facts.fused} if facts.fused else {"q_proj", "k_proj", "v_proj"}
    parts |= {facts.output, *facts.per_head}
    parts |= {"q_norm", "k_norm"} if facts.norms_over_heads else set()
    names = {part for name in moved for part in name.split(".") if part in parts}
    # In some families the values of full layers are their keys.
    assert names == parts - ({"v_proj"} if "gemma4" in facts.model_type else set())
    assert all(set(name.split(".")) & parts for name in moved)
    model.load_state_dict(weights)
    torch.testing.assert_close(logits_of(model, ids), before, **_NEAR)


@pytest.mark.parametrize("family", TESTED)
def test_packed_documents_are_separated_or_refused(family: str) -> None:
    """Families whose layers mix documents, or whose masks ignore position_ids, refuse them."""
    model, ids, border = small_model(family), tokens(1, 24), 14
    positions = torch.cat([torch.arange(border), torch.arange(24 - border)])[None]
    hybrid = materialize(model, mask_of(model.config), Window(5))
    apply_head_mask(model, mask_of(model.config), Window(5))
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, border:]
    alone = model(input_ids=ids[:, border:], use_cache=False).logits
    # In a small random model, states carried over the border may be smaller than rounding.
    is_apart = not decoder_layers(model.config).states and torch.allclose(packed, alone, **_NEAR)
    assert is_apart == known_family(model.config).separates_documents
    if is_apart:
        ours = hybrid(input_ids=ids, position_ids=positions, use_cache=False).logits[:, border:]
        torch.testing.assert_close(ours, alone, **_NEAR)
    else:
        with pytest.raises(ValueError, match="do not keep packed documents apart"):
            hybrid(input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("family", TESTED)
def test_caches_hold_the_bytes_of_the_formula(family: str) -> None:
    """Including windows of the original's layers and states of fixed size; dynamic and static."""
    model, ids = small_model(family), tokens(2, 20)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    options = {"attention_mask": padding, "max_new_tokens": 4, "do_sample": False}
    mask, kinds = mask_of(model.config), decoder_layers(model.config)
    hybrid = materialize(model, mask, Window(WINDOW))
    size = CacheSize.of(mask.heads_per_layer(Window(WINDOW)), kinds, 4, state_bytes(model))
    assert (size.state_bytes > 0) == bool(kinds.states)
    assert len(size.own_windows) == len(set(kinds.windows.values()))
    cache = hybrid.new_cache()
    text = hybrid.generate(ids, past_key_values=cache, **options)
    assert held_bytes(cache) == 2 * size.dynamic(ids.shape[1] + 3)
    static = hybrid.generate(
        ids, cache_implementation="static", return_dict_in_generate=True, **options
    )
    assert torch.equal(static.sequences, text)
    room = static.past_key_values.get_max_length()
    assert held_bytes(static.past_key_values) == 2 * size.static(room)


def _refusal(check: Callable[[], None]) -> str | None:
    try:
        check()
    except UserError as fault:
        return str(fault)
    return None


@pytest.mark.parametrize("family", TESTED)
def test_config_json_gives_the_same_layers_as_the_loaded_config(family: str) -> None:
    for config in (small_config(family), AutoConfig.for_model(family)):
        refusal = _refusal(lambda config=config: family_of(config))
        stored = StoredConfig(json.loads(config.to_json_string()))
        assert _refusal(stored.check_family) == refusal
        if refusal is None:
            assert stored.kinds == decoder_layers(config)
            assert stored.attention_needs == attention_needs(config)


_ALL_FULL = {"layer_types": ["full_attention"] * 8}


@pytest.mark.parametrize(
    ("family", "options", "changes"),
    [
        *((name, {}, {"layer_types": None}) for name in ("gemma2", "gemma3_text", "olmo3")),
        *((name, {}, {"layer_types": None}) for name in ("gpt_oss", "qwen3_next")),
        ("gemma2", _ALL_FULL, {"attn_logit_softcapping": None}),
        ("gemma4_text", _ALL_FULL, {}),
        ("gemma4_text", _ALL_FULL, {"per_layer_config": None, "global_head_dim": 512}),
    ],
)
def test_fields_that_older_files_lack_have_their_defaults(
    family: str, options: Any, changes: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=8, **options)
    content = json.loads(config.to_json_string()) | changes
    stored = StoredConfig({name: value for name, value in content.items() if value is not None})
    assert stored.kinds == decoder_layers(config)
    assert stored.attention_needs == attention_needs(config)


_GENERIC = "its attention is not known here"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "latent attention"),
        ("kimi_linear", "latent attention"),
        ("deepseek_v4", "layers of another kind"),
        ("llama4_text", "chunked_attention"),
        ("gemma3n_text", "share keys and values"),
        ("gpt2", "transposed"),
        ("falcon", "attention interface"),
        ("bert", "encoder"),
        ("mamba2", "no layer of it has full attention"),
        ("qwen3_vl_text", "take that as a whole"),
        ("qwen2_5_vl_text", "take that as a whole"),
        ("llava", "takes more than text"),
    ],
)
def test_unsupported_families_are_refused_with_their_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"'{model_type}'.*{reason}.*supported are .*qwen3"):
        family_of(AutoConfig.for_model(model_type))


def test_every_causal_model_of_transformers_is_supported_or_refused_with_a_reason() -> None:
    for model_type in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_ONLY}):
        if model_type in FAMILIES and not FAMILIES[model_type].is_part:
            assert model_type in FAMILY_NAMES  # and so equal to its oracle, by the tests above
            continue
        try:
            config = AutoConfig.for_model(model_type)
        except (StrictDataclassError, ValueError, AttributeError):  # its defaults do not fit
            config = type("Config", (), {"model_type": model_type})()
        refusal = _refusal(lambda config=config: family_of(config))
        assert refusal is not None and _GENERIC not in refusal, model_type


def test_an_older_transformers_refuses_only_the_families_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names in (CONFIG_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        monkeypatch.delitem(names, "lfm3", raising=False)
    with pytest.raises(
        UserError, match=r"has no models of type 'lfm3': docs/reference/families\.md"
    ):
        register_model("lfm3")
    register_model("smollm3")
    assert configuration.HybridSmolLM3Config.model_type == "hybrid_smollm3"
    with pytest.raises(AttributeError, match="HybridLfm3Config"):
        configuration.__getattr__("HybridLfm3Config")  # also if another test has made it


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'new' are not supported"):
        family_of(type("Config", (), {"model_type": "new", "num_hidden_layers": 2})())


def test_unsupported_settings_of_supported_families_are_refused() -> None:
    with pytest.raises(UserError, match=r"'gemma3_text'.*caps attention scores"):
        family_of(small_config("gemma3_text", attn_logit_softcapping=50.0))
    with pytest.raises(UserError, match=r"'gemma3_text'.*not causal"):
        family_of(small_config("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UserError, match="window of its own"):
        family_of(small_config("olmo3", layer_types=["sliding_attention"] * LAYERS))
    with pytest.raises(UserError, match=r"'stablelm'.*norms are a module for each head"):
        family_of(small_config("stablelm", qk_layernorm=True))
    other = SimpleNamespace(model_type="bert")
    with pytest.raises(UserError, match=r"'gemma3'.*its text decoder is of type 'bert'"):
        family_of(SimpleNamespace(model_type="gemma3", get_text_config=lambda **_: other))
