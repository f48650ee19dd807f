"""Small random models of each family, and a visibility rule written as plainly as it can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.heads import HeadMask

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
# What differs from _SIZES, so that each family's peculiarities are at work.
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
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 12, **OWN_WINDOW},
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
}  # fmt: skip
FAMILY_NAMES = tuple(_EXTRA)
PARTLY_SLIDING = tuple(name for name, extra in _EXTRA.items() if "layer_types" in extra)
SEARCHABLE = tuple(name for name in FAMILY_NAMES if name not in PARTLY_SLIDING)


def small_config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**_SIZES, **_EXTRA[family], **changes})


def small_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """Random model in eval mode; norms and biases random too, so that none of them is neutral."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "self_attn" in name:
                parameter.mul_(8.0)  # sharp attention: what a head sees must matter
    model.generation_config.eos_token_id = None
    return model.eval()


def random_mask(seed: int = 0) -> HeadMask:
    """A mixed mask: layer 0 interleaved, the others random with both kinds of heads."""
    generator = np.random.default_rng(seed)
    rows = [[True, False, True, False]]
    while len(rows) < LAYERS:
        row = generator.random(KV_HEADS) < 0.5
        if row.any() and not row.all():
            rows.append(row.tolist())
    return HeadMask(np.array(rows))


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def sees(
    query: int, key: int, valid: list[bool], document: list[int], window: int | None, sinks: int
) -> bool:
    """Whether slot `query` sees slot `key`; window None is a full head."""
    if query == key:
        return True
    if key > query or not valid[key] or document[query] != document[key]:
        return False
    if window is None or query - key < window:
        return True
    place = sum(valid[j] and document[j] == document[key] for j in range(key))
    return place < sinks
