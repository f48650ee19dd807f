"""Which decoder families can be made hybrid, and where each keeps what belongs to a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bosch.errors import UserError


@dataclass(frozen=True)
class Family:
    """A decoder family of transformers: module and class names, as in its own source.

    `fused`: query, key and value projections are the rows of one weight, in this order.
    `norms_over_heads`: the weights of the query and key norms have an entry for each head's
    dimensions, instead of sharing one head's among all. `head_logits`: the parameter with a logit
    of each query head, if there is one. `caps_scores`: attention scores are capped.
    `separates_documents`: its masks keep packed documents apart, which position_ids tell.
    `base_config`: its config class, where that is not named as the model class is. `full_every`:
    where config.json lists no layer_types but a window, every so many layers have full attention,
    0 for none of them; None where the window may be switched off by another option.
    """

    model_type: str
    module: str
    prefix: str
    fused: bool = False
    norms_over_heads: bool = False
    head_logits: str = ""
    caps_scores: bool = False
    separates_documents: bool = True
    base_config: str = ""
    full_every: int | None = None

    @property
    def hybrid_type(self) -> str:
        """model_type of the hybrid form: a plain load without bosch does not know it."""
        return f"hybrid_{self.model_type}"

    @property
    def base_config_class(self) -> str:
        """Name of the config class of the family itself."""
        return self.base_config or f"{self.prefix}Config"

    @property
    def config_class(self) -> str:
        """Name of the config class of the hybrid form."""
        return f"Hybrid{self.prefix}Config"

    @property
    def model_class(self) -> str:
        """Name of the model class of the hybrid form."""
        return f"Hybrid{self.prefix}ForCausalLM"


SLIDING = "sliding_attention"

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen3", "qwen3", "Qwen3"),
        Family("qwen3_moe", "qwen3_moe", "Qwen3Moe"),
        Family("llama", "llama", "Llama"),
        Family("qwen2", "qwen2", "Qwen2"),
        Family("qwen2_moe", "qwen2_moe", "Qwen2Moe"),
        Family("mistral", "mistral", "Mistral", full_every=0),
        Family("ministral", "ministral", "Ministral", full_every=0),
        Family("ministral3", "ministral3", "Ministral3"),
        Family("mixtral", "mixtral", "Mixtral", full_every=0),
        Family("olmo", "olmo", "Olmo"),
        Family("olmo2", "olmo2", "Olmo2", norms_over_heads=True),
        Family("olmo3", "olmo3", "Olmo3", norms_over_heads=True, full_every=4),
        Family("olmoe", "olmoe", "Olmoe", norms_over_heads=True),
        Family("flex_olmo", "flex_olmo", "FlexOlmo", norms_over_heads=True),
        Family("phi3", "phi3", "Phi3", fused=True, full_every=0),
        Family("phimoe", "phimoe", "Phimoe", full_every=0),
        Family("gemma", "gemma", "Gemma"),
        Family("gemma2", "gemma2", "Gemma2", caps_scores=True, full_every=2),
        Family("gemma3_text", "gemma3", "Gemma3", base_config="Gemma3TextConfig", full_every=6),
        Family(
            "gpt_oss",
            "gpt_oss",
            "GptOss",
            head_logits="sinks",
            separates_documents=False,
            full_every=2,
        ),
        Family("granite", "granite", "Granite"),
        Family("granitemoe", "granitemoe", "GraniteMoe"),
        Family("granitemoeshared", "granitemoeshared", "GraniteMoeShared"),
        Family("cohere", "cohere", "Cohere", norms_over_heads=True),
        Family("cohere2", "cohere2", "Cohere2", full_every=4),
        Family("glm", "glm", "Glm"),
        Family("glm4", "glm4", "Glm4"),
        Family("glm4_moe", "glm4_moe", "Glm4Moe"),
        Family("nemotron", "nemotron", "Nemotron"),
        Family("exaone4", "exaone4", "Exaone4", full_every=4),
        Family("hunyuan_v1_dense", "hunyuan_v1_dense", "HunYuanDenseV1"),
        Family("hunyuan_v1_moe", "hunyuan_v1_moe", "HunYuanMoEV1"),
        Family("ernie4_5", "ernie4_5", "Ernie4_5"),
        Family("ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_Moe"),
        Family("apertus", "apertus", "Apertus"),
        Family("arcee", "arcee", "Arcee"),
        Family("helium", "helium", "Helium"),
        Family("minimax_m2", "minimax_m2", "MiniMaxM2", norms_over_heads=True),
        Family("solar_open", "solar_open", "SolarOpen"),
        Family("jais2", "jais2", "Jais2"),
        Family("seed_oss", "seed_oss", "SeedOss"),
        Family("smollm3", "smollm3", "SmolLM3"),
        Family("starcoder2", "starcoder2", "Starcoder2", full_every=0),
    )
}

_REASONS = {
    "granite_swa": "its softmax has a learned logit for each head beside those of the keys",
    "bitnet": "its output projection quantises all heads by one scale",
}


def family_of(config: Any) -> Family:
    """The family of an ordinary model; raises UserError when it cannot be made hybrid."""
    model_type = str(getattr(config, "model_type", None))
    reason = _reason(config)
    if model_type not in FAMILIES or reason:
        because = f": {reason}" if reason else ""
        raise UserError(
            f"model.path: models of type '{model_type}' are not supported{because}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    own = base_windows(config)
    if None not in own:
        raise UserError(
            f"model.path: the model has a sliding window of its own ({own[0]} tokens) in every "
            "layer, so its heads are not full attention; set sliding_window to null in its "
            "config.json to start from full attention"
        )
    return FAMILIES[model_type]


def _reason(config: Any) -> str | None:
    """Why a model cannot be made hybrid, as far as its configuration tells."""
    model_type = str(getattr(config, "model_type", None))
    if model_type in _REASONS:
        return _REASONS[model_type]
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", SLIDING}
    if others:
        return f"it has layers of another kind ({', '.join(sorted(others))})"
    if getattr(config, "text_config", None) is not None:
        return "it takes more than text; take its text model by itself"
    if getattr(config, "kv_lora_rank", None):
        return "its heads share compressed keys and values (multi-head latent attention)"
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if capped and not (model_type in FAMILIES and FAMILIES[model_type].caps_scores):
        return "it caps attention scores"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is not causal"
    return None


def base_windows(config: Any) -> list[int | None]:
    """The window of each layer that slides in the base model too, None for full attention.

    transformers counts a window as bosch does, the query's own position included. Such a layer
    keeps its window whatever a head mask says of it.
    """
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return [None] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    return [window if kind == SLIDING else None for kind in types]


def check_searchable(config: Any) -> None:
    """Raise UserError for a model that can be hybrid, but in which no search is made."""
    family = family_of(config)
    own = [layer for layer, window in enumerate(base_windows(config)) if window is not None]
    reason = None
    if own:
        reason = (
            f"{len(own)} of its layers, layer {own[0]} first, slide by themselves, and the search "
            "would give away its budget on heads that slide already"
        )
    elif family.caps_scores or family.head_logits:
        reason = (
            "it caps attention scores or adds logits to them, which the passes of a search do not"
        )
    if reason:
        raise UserError(
            f"model.path: heads are not searched in this model of type '{family.model_type}', "
            f"because {reason}; bosch.materialize makes it hybrid by a head mask that is given"
        )
