"""Every family: search mode, deploy mode, a saved model and the oracle are the same function.

Models that take images read them as the original does. The reference is the eager backend, which
equals transformers' own eager attention with every head full, images included.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from bosch.errors import UserError
from bosch.hybrid import hybrid_classes, layouts_of
from bosch.masks import HeadMask
from bosch.model.cache import held_bytes, state_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import attention_needs, check_family, decoder_layers, mixes_documents
from bosch.model.head_weights import measure_head_weights
from bosch.model.loading import load_model
from bosch.model.materialize import check_hybrid, materialize, permute_heads
from bosch.model.registration import register_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.model.stored_config import StoredConfig
from bosch.score.decoder_shape import DecoderShape
from bosch.score.flops import Flops
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
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


def _greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("family", TESTED)
def test_search_oracle_deploy_and_saved_model_agree(family: str, tmp_path: Path) -> None:
    """Every other family with sinks, every other two with three windows."""
    model, ids = small_model(family), tokens(2, 40)
    several, with_sinks = divmod(FAMILY_NAMES.index(family) % 4, 2)
    mask = mask_of(model.config, Window(WINDOW, 2 * with_sinks))
    if several:
        layers, heads = mask.shape
        in_order = np.tile(np.array((0, 17, 9, 4))[np.arange(heads) % 4], (layers, 1))
        shuffled = np.random.default_rng(1).permuted(in_order, axis=1)
        mask = HeadMask(shuffled.tolist(), 2 * with_sinks)
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
    apply_head_mask(model, mask)
    oracle = logits_of(model, ids)
    assert (oracle - original).abs().max() > 0.05
    prepare_for_search(model, "sdpa")
    apply_head_mask(model, mask)
    torch.testing.assert_close(logits_of(model, ids), oracle, **_NEAR)

    hybrid = materialize(model, mask)
    trained = [[weight.requires_grad for weight in m.parameters()] for m in (model, hybrid)]
    assert trained[0] == trained[1]
    torch.testing.assert_close(logits_of(hybrid, ids), oracle, **_NEAR)
    with pytest.raises(ValueError, match="sdpa backend computes no attention weights"):
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
    shape, flops = DecoderShape.of(model.config), Flops(model)
    parts = model.get_decoder(), model.get_output_embeddings()
    parameters = {id(p): p.numel() for part in parts for p in part.parameters()}
    assert shape.parameters == sum(parameters.values())
    assert shape.active_parameters == (flops.all_linear + flops.output_head) // 2
    layers = [sum(p.numel() for p in layer.parameters()) for layer in parts[0].layers]
    assert shape.layer_parameters == max(layers)
    assert shape.tables == shape.parameters - sum(layers)
    assert shape.kinds == decoder_layers(model.config)
    hybrid = materialize(model, mask_of(model.config, Window(WINDOW)))
    places = hybrid.config.hybrid_attention["weights"].values()
    (outputs,) = (sizes for axis, sizes in places if axis == 1)
    assert shape.query_size == sum(outputs) * shape.key_value_heads
    assert DecoderShape.of(hybrid.config) == shape
    # Read from the hybrid's directory, whose config.json refuses the family's own class.
    stored = StoredConfig(json.loads(hybrid.config.to_json_string()))
    assert stored.kinds == shape.kinds
    assert DecoderShape.of(stored.of_transformers()) == shape


def test_sizes_are_built_once_for_equal_configurations() -> None:
    config = small_config("qwen3_moe")
    shape = DecoderShape.of(config)
    assert DecoderShape.of(copy.deepcopy(config)) is shape
    own = type("OwnConfig", (type(config),), {})(**config.to_dict())  # of a model with its own code
    own.auto_map = {"AutoModelForCausalLM": "modeling.OwnModel"}
    assert DecoderShape.of(own) == shape
    config.intermediate_size *= 2
    config.moe_intermediate_size *= 2
    assert DecoderShape.of(config).parameters > shape.parameters


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
    places, _ = measure_head_weights(model)
    weights = dict(permute_heads(model, mask_of(model.config, Window(WINDOW)).head_order, places))
    moved = {n for n, w in model.state_dict().items() if not torch.equal(w, weights[n])}
    assert {n.partition(".layers.")[2].partition(".")[2] for n in moved} == places.keys()
    assert {axis for axis, _ in places.values()} == {0, 1}
    model.load_state_dict(weights)
    torch.testing.assert_close(logits_of(model, ids), before, **_NEAR)


@pytest.mark.parametrize("family", TESTED)
def test_packed_documents_are_separated_or_refused(family: str) -> None:
    """Families whose layers mix documents, or whose masks ignore position_ids, refuse them."""
    model, ids, border = small_model(family), tokens(1, 24), 14
    positions = torch.cat([torch.arange(border), torch.arange(24 - border)])[None]
    hybrid = materialize(model, mask_of(model.config, Window(5)))
    apply_head_mask(model, mask_of(model.config, Window(5)))
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, border:]
    alone = model(input_ids=ids[:, border:], use_cache=False).logits
    # In a small random model, states carried over the border may be smaller than rounding.
    is_apart = not decoder_layers(model.config).states and torch.allclose(packed, alone, **_NEAR)
    assert is_apart != mixes_documents(model.config)
    measured = hybrid.config.hybrid_attention["mixes_documents"]
    assert measured or is_apart or decoder_layers(model.config).states
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
    mask, kinds = mask_of(model.config, Window(WINDOW)), decoder_layers(model.config)
    hybrid = materialize(model, mask)
    size = CacheSize.of(mask.layers, kinds, 4, state_bytes(model))
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
        refusal = _refusal(lambda config=config: check_family(config))
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


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "latent attention"),
        ("kimi_linear", "latent attention"),
        ("deepseek_v4", "layers of another kind"),
        ("llama4_text", "chunked_attention"),
        ("gemma3n_text", "share keys and values"),
        ("mamba2", "no layer of it has full attention"),
    ],
)
def test_unsupported_families_are_refused_with_their_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"'{model_type}' cannot be made hybrid: .*{reason}"):
        check_family(AutoConfig.for_model(model_type))


def test_an_older_transformers_refuses_only_the_families_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(CONFIG_MAPPING_NAMES, "lfm3", raising=False)
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "lfm3", raising=False)
    with pytest.raises(UserError, match="has no decoders of type 'lfm3'; docs/reference/families"):
        register_model("lfm3")
    register_model("smollm3")
    assert hybrid_classes("smollm3")[0].model_type == "hybrid_smollm3"


def test_unsupported_settings_of_supported_families_are_refused() -> None:
    with pytest.raises(UserError, match=r"'gemma3_text'.*not causal"):
        check_family(small_config("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UserError, match="window of its own"):
        check_family(small_config("olmo3", layer_types=["sliding_attention"] * LAYERS))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("stablelm", {"qk_layernorm": True}, r"q_layernorm\.norms\.0\.weight cannot be told apart"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "it caps attention scores"),
    ],
)
def test_heads_that_cannot_be_told_apart_are_refused(
    family: str, options: dict[str, Any], reason: str
) -> None:
    model = small_model(family, **options)
    with pytest.raises(UserError, match=f"'{family}' cannot be made hybrid: .*{reason}"):
        materialize(model, mask_of(model.config, Window(WINDOW)))


class NewConfig(Qwen3Config):
    model_type = "brand_new"


class NewAttention(Qwen3Attention):
    """One projection, transposed and by heads, and a factor for each query head."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj, self.v_proj
        heads, width = config.num_key_value_heads, self.num_key_value_groups + 2
        self.mixed = nn.Parameter(torch.randn(config.hidden_size, heads * width * self.head_dim))
        self.factors = nn.Parameter(torch.rand(config.num_attention_heads) + 0.5)

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **options: Any
    ) -> Any:
        heads = self.config.num_key_value_heads
        mixed = (hidden_states @ self.mixed).unflatten(-1, (heads, -1, self.head_dim))
        groups = mixed.split([self.num_key_value_groups, 1, 1], dim=-2)
        query, key, value = (states.flatten(2, 3).transpose(1, 2) for states in groups)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = options.pop("past_key_values", None) or options.pop("cache", None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **options
        )
        return self.o_proj((out * self.factors[:, None]).flatten(2)), weights


class NewModel(Qwen3Model):
    config_class = config = NewConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = NewAttention(config, number)


class NewForCausalLM(Qwen3ForCausalLM):
    config_class = config = NewConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = NewModel(config)


def test_a_family_that_bosch_does_not_know_becomes_hybrid(tmp_path: Path) -> None:
    AutoConfig.register("brand_new", NewConfig, exist_ok=True)
    AutoModel.register(NewConfig, NewModel, exist_ok=True)
    AutoModelForCausalLM.register(NewConfig, NewForCausalLM, exist_ok=True)
    torch.manual_seed(0)
    content = small_config("qwen3").to_dict() | {"model_type": "brand_new"}
    model, ids = NewForCausalLM(NewConfig(**content)).eval(), tokens(2, 40)
    check_hybrid(model, ids)
    apply_head_mask(model, mask_of(model.config, Window(WINDOW)))
    hybrid = materialize(model, mask_of(model.config, Window(WINDOW)))
    places = hybrid.config.hybrid_attention["weights"]
    assert places == {
        "self_attn.mixed": (1, [4 * 8]), "self_attn.factors": (0, [2]),
        "self_attn.o_proj.weight": (1, [2 * 8]),
    }  # fmt: skip
    torch.testing.assert_close(logits_of(hybrid, ids), logits_of(model, ids), **_NEAR)
    hybrid.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert torch.equal(logits_of(loaded, ids), logits_of(hybrid, ids))


IMAGE_WINDOW = Window(7, 2)
IMAGE = 60  # the last token of the vocabulary
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def _inputs(family: str, config: Any) -> dict[str, torch.Tensor]:
    """Two prompts with an image each: one at the start, one in the middle."""
    ids = tokens(2, 40).clamp(max=IMAGE - 1)
    generator = torch.Generator().manual_seed(1)
    vision = config.vision_config
    if family in QWEN:
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        images = {
            "pixel_values": torch.randn(32, patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        }
        count = 16 // vision.spatial_merge_size**2
    else:
        images = {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "image_sizes": torch.tensor([[16, 16], [16, 16]]),
        }
        count = 1
    ids[0, 2 : 2 + count] = IMAGE
    ids[1, 20 : 20 + count] = IMAGE
    if family in QWEN:
        images["mm_token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, **images}


def _model(family: str) -> Any:
    model = small_model(family)
    name = "image_token_id" if family in QWEN else "image_token_index"
    setattr(model.config, name, IMAGE)
    return model


def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("family", [*QWEN, "mistral3"])
def test_images_pass_through_search_and_deploy_mode(family: str) -> None:
    model = _model(family)
    inputs = _inputs(family, model.config)
    model.set_attn_implementation("eager")
    original = _logits(model, inputs)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    assert (_logits(model, other) - original).abs().max() > 1e-3  # the images are read
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    prepare_for_search(model, "eager")
    torch.testing.assert_close(_logits(model, inputs), original, **_NEAR)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), text)

    mask = mask_of(model.config, IMAGE_WINDOW)
    apply_head_mask(model, mask)
    oracle = _logits(model, inputs)
    assert (oracle - original).abs().max() > 0.05
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    hybrid = materialize(model, mask)
    torch.testing.assert_close(_logits(hybrid, inputs), oracle, **_NEAR)
    assert torch.equal(hybrid.generate(**inputs, max_new_tokens=6, do_sample=False), text)
