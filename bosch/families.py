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
    dimensions, instead of sharing one head's among all.
    """

    model_type: str
    module: str
    prefix: str
    fused: bool = False
    norms_over_heads: bool = False

    @property
    def hybrid_type(self) -> str:
        """model_type of the hybrid form: a plain load without bosch does not know it."""
        return f"hybrid_{self.model_type}"

    @property
    def config_class(self) -> str:
        """Name of the config class of the hybrid form."""
        return f"Hybrid{self.prefix}Config"

    @property
    def model_class(self) -> str:
        """Name of the model class of the hybrid form."""
        return f"Hybrid{self.prefix}ForCausalLM"


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen3", "qwen3", "Qwen3"),
        Family("qwen3_moe", "qwen3_moe", "Qwen3Moe"),
        Family("llama", "llama", "Llama"),
        Family("qwen2", "qwen2", "Qwen2"),
        Family("mistral", "mistral", "Mistral"),
        Family("mixtral", "mixtral", "Mixtral"),
        Family("olmo", "olmo", "Olmo"),
        Family("olmo2", "olmo2", "Olmo2", norms_over_heads=True),
        Family("olmoe", "olmoe", "Olmoe", norms_over_heads=True),
        Family("phi3", "phi3", "Phi3", fused=True),
        Family("gemma", "gemma", "Gemma"),
        Family("granite", "granite", "Granite"),
        Family("seed_oss", "seed_oss", "SeedOss"),
        Family("smollm3", "smollm3", "SmolLM3"),
        Family("starcoder2", "starcoder2", "Starcoder2"),
    )
}

_REASONS = {
    "gemma2": "it caps attention scores and has sliding layers of its own",
    "gemma3": "it has sliding layers of its own",
    "gemma3_text": "it has sliding layers of its own",
    "gpt_oss": "its attention sinks are logits and it has sliding layers of its own",
    "olmo3": "it has sliding layers of its own",
}


def family_of(config: Any) -> Family:
    """The family of an ordinary model; raises UserError when it cannot be made hybrid."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        reason = _REASONS.get(str(model_type))
        because = f": {reason}" if reason else ""
        raise UserError(
            f"model.path: models of type '{model_type}' are not supported{because}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    own_window = getattr(config, "sliding_window", None)
    if sliding or (own_window is not None and getattr(config, "use_sliding_window", True)):
        raise UserError(
            f"model.path: the model has a sliding window of its own ({own_window} tokens), so its "
            "heads are not full attention; set sliding_window to null in its config.json to start "
            "from full attention"
        )
    return FAMILIES[str(model_type)]
