"""Small random models of each family, and a plainly written rule of visibility."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from bosch.masks import HeadMask
from bosch.model.loading import auto_class
from bosch.model.search_mode import mask_shape
from bosch.window import Window

LAYERS, KV_HEADS, VOCABULARY = 3, 4, 61

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
OWN_WINDOW: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
_WITH_STATES = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
_DELTA_NET: dict[str, Any] = {
    "head_dim": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, **_WITH_STATES,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 8, "mamba_n_groups": 2}
_GEMMA4: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": KV_HEADS,
    "num_key_value_heads": 2, "attention_k_eq_v": True, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "final_logit_softcapping": 0.3,
    **OWN_WINDOW,
}  # fmt: skip
# Text decoders of families with other inputs, too; their vision towers are as small.
_TEXT = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Differences from _SIZES that bring out each family's peculiarities.
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS},
    "llama": {"attention_bias": True},
    "qwen2": {},
    "qwen2_moe": {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **_EXPERTS,
    },
    "mistral": {"sliding_window": None, "head_dim": 8},
    "ministral": {"head_dim": 8, **OWN_WINDOW},
    "ministral3": {"sliding_window": None, "head_dim": 8},
    "mixtral": {"sliding_window": None, "num_local_experts": 3, "head_dim": 8},
    "olmo": {"clip_qkv": 1.5},
    "olmo2": {},
    "olmo3": OWN_WINDOW,
    "olmoe": _EXPERTS,
    "flex_olmo": _EXPERTS,
    "phi3": {"partial_rotary_factor": 0.5},
    "phimoe": {"sliding_window": None, **_LOCAL_EXPERTS},
    "gemma": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.5, **OWN_WINDOW,
    },
    "gemma3_text": {
        "head_dim": 8, "query_pre_attn_scalar": 12, "final_logit_softcapping": 0.3, **OWN_WINDOW,
    },
    "gpt_oss": {"head_dim": 8, "rope_parameters": None, **_LOCAL_EXPERTS, **OWN_WINDOW},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 0.5},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoeshared": {"shared_intermediate_size": 16, **_LOCAL_EXPERTS},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {"head_dim": 8, "logit_scale": 1.0, **OWN_WINDOW},
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8, "use_qk_norm": True, **_ROUTED_EXPERTS},
    "nemotron": {},
    "exaone4": {"head_dim": 8, **OWN_WINDOW},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "apertus": {},
    "arcee": {"head_dim": 8},
    "helium": {"head_dim": 6},
    "minimax_m2": {"head_dim": 8, **_LOCAL_EXPERTS},
    "solar_open": {"head_dim": 8, **_ROUTED_EXPERTS},
    "jais2": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {},
    "stablelm": {"partial_rotary_factor": 0.5, "num_attention_heads": KV_HEADS},
    "phi": {"partial_rotary_factor": 0.5, "num_attention_heads": KV_HEADS},
    "gpt_neox": {"num_key_value_heads": None, "num_attention_heads": KV_HEADS},
    "opt": {"ffn_dim": 40, "num_attention_heads": KV_HEADS, "word_embed_proj_dim": 48},
    "biogpt": {"num_attention_heads": KV_HEADS},
    "persimmon": {"num_attention_heads": KV_HEADS, "num_key_value_heads": KV_HEADS},
    "hyperclovax": {"head_dim": 8, "logits_scaling": 0.5},
    "hy_v3": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS},
    "nanochat": {"head_dim": 8},
    "dots1": {"head_dim": 8, "n_shared_experts": 1, **_ROUTED_EXPERTS},
    "aria_text": {"head_dim": 8, "moe_num_experts": 4, "moe_topk": 2},
    "mellum": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS, **OWN_WINDOW},
    "cwm": {"head_dim": 8, **OWN_WINDOW},
    "exaone_moe": {"head_dim": 8, **_ROUTED_EXPERTS, **OWN_WINDOW},
    "cohere2_moe": {"head_dim": 8, "logit_scale": 1.0, **_EXPERTS, **OWN_WINDOW},
    "vaultgemma": {"head_dim": 8, "attn_logit_softcapping": 1.5, **OWN_WINDOW},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "granite_swa": {"head_dim": 8, **OWN_WINDOW},
    "granitemoe_swa": {**_LOCAL_EXPERTS, **OWN_WINDOW},
    "flint": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS, **OWN_WINDOW},
    "kolibri1": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS, **OWN_WINDOW},
    "afmoe": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS, **OWN_WINDOW},
    "beam": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS, **OWN_WINDOW},
    "laguna": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS},
    "qwen3_next": {"moe_intermediate_size": 16, **_EXPERTS, **_DELTA_NET},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {"moe_intermediate_size": 16, **_EXPERTS, **_DELTA_NET},
    "olmo_hybrid": _DELTA_NET,
    "nemotron_h": {
        "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8, "num_hidden_layers": None,
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "full_attention"],
    },
    "granitemoehybrid": {
        "shared_intermediate_size": 16, **_LOCAL_EXPERTS, **_MAMBA, **_WITH_STATES,
    },
    "bamba": {"attn_layer_indices": [0, 2], **_MAMBA},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False, **_EXPERTS,
    },
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 32, "lm_head_multiplier": 0.5, **_MAMBA},
    "lfm2": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["full_attention", "conv", "full_attention"], "num_dense_layers": 1,
        "moe_intermediate_size": 16, **_EXPERTS,
    },
    "lara_mini": {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **_EXPERTS,
        **_DELTA_NET, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "linear_attention"],
    },
    "lfm3": {"head_dim": 8, "layer_types": ["full_attention", "conv", "full_attention"]},
    **{family: {} for family in _TEXT},
}  # fmt: skip
# An older transformers has no code for the newest families (docs/reference/families.md).
_EXTRA = {family: extra for family, extra in _EXTRA.items() if family in CONFIG_MAPPING}
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    "head_dim": 8,
}
_MROPE_OF_6 = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
}
_TEXT_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _MROPE_OF_6,
    "qwen2_5_vl_text": _MROPE_OF_6,
    "qwen3_vl_text": _MROPE,
    "qwen3_vl_moe_text": {"moe_intermediate_size": 16, **_EXPERTS, **_MROPE},
}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 48,
    "embed_dim": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8,
}  # fmt: skip
FAMILY_NAMES = tuple(_EXTRA)
# Families of each kind: dense, fused, with experts, with images, with sink logits, with layers that
# slide or hold a state of fixed size. `launch/test.sh full` tests all.
_EIGHT = ("qwen3", "llama", "gemma3", "gpt_oss", "qwen3_moe", "phi3", "olmo3", "qwen3_next")
ALL_FAMILIES = os.environ.get("BOSCH_TESTS") == "full"
TESTED = FAMILY_NAMES if ALL_FAMILIES else _EIGHT


def small_config(family: str = "qwen3", **changes: Any) -> Any:
    if family not in _TEXT:
        return AutoConfig.for_model(family, **{**_SIZES, **_EXTRA[family], **changes})
    text = _TEXT[family]
    extra = _EXTRA[text] if text in _EXTRA else _TEXT_EXTRA[text]
    default = AutoConfig.for_model(family)
    known = default.vision_config or AutoConfig.for_model(f"{family}_vision")
    vision = {name: value for name, value in _VISION.items() if hasattr(known, name)}
    return AutoConfig.for_model(
        family,
        text_config={"model_type": text, **_SIZES, **extra, **changes},
        vision_config={"model_type": known.model_type, **vision},
    )


def small_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """Random model in eval mode; norms and biases are random, too, so that each has an effect."""
    torch.manual_seed(seed)
    config = small_config(family, **changes)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "self_attn" in name or ".attention." in name:
                parameter.mul_(8.0)  # sharp attention, so that a head's window matters
    model.generation_config.eos_token_id = None
    return model.eval()


def random_mask(window: Window, seed: int = 0, layers: int = LAYERS) -> HeadMask:
    """A mixed mask: row 0 interleaved, the others random with both kinds of heads."""
    generator = np.random.default_rng(seed)
    rows = [[True, False, True, False]]
    while len(rows) < layers:
        row = generator.random(KV_HEADS) < 0.5
        if row.any() and not row.all():
            rows.append(row.tolist())
    return HeadMask.of(rows, window)


def mask_of(config: Any, window: Window, seed: int = 0) -> HeadMask:
    """A mixed mask for the layers of a model that have full attention."""
    return random_mask(window, seed, mask_shape(config)[0])


def sliding_mask(rows: Sequence[Iterable[int]], heads: int, window: Window) -> HeadMask:
    """The mask in which these KV heads of each layer slide."""
    return HeadMask.of([[head not in row for head in range(heads)] for row in rows], window)


def of_choices(choices: Any, windows: Sequence[Window]) -> HeadMask:
    """The mask with choices [L, HKV]: 0 full, k the k-th window from the widest down."""
    sizes = np.array([0, *sorted((window.size for window in windows), reverse=True)])
    return HeadMask(sizes[np.asarray(choices)].tolist(), windows[0].sinks)


def sliding_heads(mask: Any) -> list[list[int]]:
    """The sliding KV heads of each layer, of a mask or of booleans that are true for full heads."""
    is_full = mask.is_full if isinstance(mask, HeadMask) else mask
    return [np.flatnonzero(~row).tolist() for row in is_full]


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def logits_of(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of a pass without a cache."""
    with torch.inference_mode():
        return model(ids, use_cache=False, **options).logits
