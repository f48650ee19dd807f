"""Which decoder families can be made hybrid, and where each keeps what belongs to a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bosch.errors import UserError


@dataclass(frozen=True)
class Family:
    """A decoder family of transformers: module and class names, as in its own source.

    `head` ends the name of its model class: one that takes more than text has another, and its text
    decoder is a family too; "" is a text decoder that has no model class of its own.
    `fused`: the projection of queries, keys and values in one weight, in this order.
    `attention` and `output`: what a layer calls its attention and that its output projection.
    `gated`: attention outputs are multiplied by a gate before they are projected. `per_head`:
    parameters with equally many entries for each head, beside those of queries, keys and values.
    `norms_over_heads`: the weights of the query and key norms have an entry for each head's
    dimensions, instead of sharing one head's among all. `caps_scores`: attention scores are capped.
    `separates_documents`: its masks keep packed documents apart, which position_ids tell.
    `base_config`: its config class, where that is not named as the model class is. `full_every`:
    where config.json lists no layer_types but a window, every so many layers have full attention,
    0 for none of them; None where the window may be switched off by another option.
    `activation`: the field of its configuration that names the activation function, or another
    that takes no list.
    `linear_every`: every n-th layer is full, the others linear. `beside_states`: every layer has
    linear attention beside its full attention. `layers_return_weights`: a layer returns attention
    weights, or a place for them, beside its hidden states. `mlp_maps`: projections of an MLP or an
    expert, 3 with a gate. `gate_per_head`: the attention's gate is a number for each head.
    `experts_like_mlp`: experts are as wide as intermediate_size says, and every token visits this
    many more. `learned_positions`: rows of its table of positions beside those in config.json,
    None where it has no such table.
    """

    model_type: str
    module: str
    prefix: str
    head: str = "ForCausalLM"
    fused: str = ""
    attention: str = "self_attn"
    output: str = "o_proj"
    gated: bool = False
    per_head: tuple[str, ...] = ()
    norms_over_heads: bool = False
    caps_scores: bool = False
    separates_documents: bool = True
    base_config: str = ""
    full_every: int | None = None
    activation: str = "hidden_act"
    linear_every: int = 0
    beside_states: bool = False
    layers_return_weights: bool = False
    mlp_maps: int = 3
    gate_per_head: bool = False
    experts_like_mlp: int | None = None
    learned_positions: int | None = None

    @property
    def hybrid_type(self) -> str:
        """model_type of the hybrid form: a plain load without bosch does not know it."""
        return HYBRID_PREFIX + self.model_type

    @property
    def base_config_class(self) -> str:
        """Name of the config class of the family itself."""
        return self.base_config or f"{self.prefix}Config"

    @property
    def base_model_class(self) -> str:
        """Name of the model class of the family itself."""
        return self.prefix + self.head

    @property
    def takes_more_than_text(self) -> bool:
        """Whether the model has a text decoder within it."""
        return self.head == _MORE_THAN_TEXT

    @property
    def config_class(self) -> str:
        """Name of the config class of the hybrid form."""
        return f"Hybrid{self.base_config_class}"

    @property
    def model_class(self) -> str:
        """Name of the model class of the hybrid form."""
        return f"Hybrid{self.base_model_class}"

    @property
    def decoder_class(self) -> str:
        """Name of the hybrid form's class without a language model's head."""
        return f"Hybrid{self.base_config_class.removesuffix('Config')}Model"


_MORE_THAN_TEXT = "ForConditionalGeneration"
HYBRID_PREFIX = "hybrid_"
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
        Family("phi3", "phi3", "Phi3", fused="qkv_proj", full_every=0),
        Family("phimoe", "phimoe", "Phimoe", full_every=0),
        Family("gemma", "gemma", "Gemma"),
        Family(
            "gemma2",
            "gemma2",
            "Gemma2",
            caps_scores=True,
            full_every=2,
            activation="hidden_activation",
        ),
        Family(
            "gemma3_text",
            "gemma3",
            "Gemma3",
            base_config="Gemma3TextConfig",
            full_every=6,
            activation="hidden_activation",
        ),
        Family(
            "gpt_oss",
            "gpt_oss",
            "GptOss",
            per_head=("sinks",),
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
        Family("nemotron", "nemotron", "Nemotron", mlp_maps=2),
        Family("exaone4", "exaone4", "Exaone4", full_every=4),
        Family("hunyuan_v1_dense", "hunyuan_v1_dense", "HunYuanDenseV1"),
        Family("hunyuan_v1_moe", "hunyuan_v1_moe", "HunYuanMoEV1", experts_like_mlp=1),
        Family("ernie4_5", "ernie4_5", "Ernie4_5"),
        Family("ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_Moe"),
        Family("apertus", "apertus", "Apertus", mlp_maps=2),
        Family("arcee", "arcee", "Arcee", mlp_maps=2),
        Family("helium", "helium", "Helium"),
        Family("minimax_m2", "minimax_m2", "MiniMaxM2", norms_over_heads=True),
        Family("solar_open", "solar_open", "SolarOpen"),
        Family("jais2", "jais2", "Jais2", mlp_maps=2),
        Family("seed_oss", "seed_oss", "SeedOss"),
        Family("smollm3", "smollm3", "SmolLM3"),
        Family("starcoder2", "starcoder2", "Starcoder2", full_every=0, mlp_maps=2),
        Family("stablelm", "stablelm", "StableLm"),
        Family("phi", "phi", "Phi", output="dense", mlp_maps=2),
        Family(
            "gpt_neox",
            "gpt_neox",
            "GPTNeoX",
            fused="query_key_value",
            attention="attention",
            output="dense",
            per_head=("query_key_value",),
            mlp_maps=2,
        ),
        Family(
            "opt",
            "opt",
            "OPT",
            output="out_proj",
            activation="activation_function",
            mlp_maps=2,
            learned_positions=2,
        ),
        Family("biogpt", "biogpt", "BioGpt", output="out_proj", mlp_maps=2, learned_positions=2),
        Family(
            "persimmon",
            "persimmon",
            "Persimmon",
            fused="query_key_value",
            output="dense",
            per_head=("query_key_value",),
            mlp_maps=2,
        ),
        Family("hyperclovax", "hyperclovax", "HyperCLOVAX"),
        Family("hy_v3", "hy_v3", "HYV3"),
        Family("nanochat", "nanochat", "NanoChat", mlp_maps=2),
        Family("dots1", "dots1", "Dots1"),
        Family("aria_text", "aria", "AriaText"),
        Family("mellum", "mellum", "Mellum"),
        Family("cwm", "cwm", "Cwm"),
        Family("exaone_moe", "exaone_moe", "ExaoneMoe"),
        Family("cohere2_moe", "cohere2_moe", "Cohere2Moe"),
        Family(
            "vaultgemma",
            "vaultgemma",
            "VaultGemma",
            caps_scores=True,
            activation="hidden_activation",
        ),
        Family(
            "gemma4_text",
            "gemma4",
            "Gemma4",
            base_config="Gemma4TextConfig",
            activation="hidden_activation",
        ),
        Family(
            "gemma4_unified_text",
            "gemma4_unified",
            "Gemma4Unified",
            base_config="Gemma4UnifiedTextConfig",
            activation="hidden_activation",
        ),
        Family("granite_swa", "granite_swa", "GraniteSWA", per_head=("sinks",)),
        Family("granitemoe_swa", "granitemoe_swa", "GraniteMoeSWA", per_head=("sinks",)),
        Family("flint", "flint", "Flint", per_head=("sinks",)),
        Family("kolibri1", "kolibri1", "Kolibri1"),
        Family("afmoe", "afmoe", "Afmoe", gated=True, per_head=("gate_proj",)),
        Family("beam", "beam", "Beam", gated=True, per_head=("gate_proj", "gate_bias")),
        Family("laguna", "laguna", "Laguna", gated=True, per_head=("g_proj",), gate_per_head=True),
        Family(
            "qwen3_next",
            "qwen3_next",
            "Qwen3Next",
            gated=True,
            separates_documents=False,
            linear_every=4,
        ),
        Family(
            "qwen3_5_text",
            "qwen3_5",
            "Qwen3_5",
            gated=True,
            separates_documents=False,
            base_config="Qwen3_5TextConfig",
            linear_every=4,
        ),
        Family(
            "qwen3_5_moe_text",
            "qwen3_5_moe",
            "Qwen3_5Moe",
            gated=True,
            separates_documents=False,
            base_config="Qwen3_5MoeTextConfig",
            linear_every=4,
        ),
        Family(
            "olmo_hybrid",
            "olmo_hybrid",
            "OlmoHybrid",
            norms_over_heads=True,
            separates_documents=False,
            linear_every=4,
        ),
        Family(
            "nemotron_h",
            "nemotron_h",
            "NemotronH",
            attention="mixer",
            separates_documents=False,
            activation="mlp_hidden_act",
            mlp_maps=2,
        ),
        Family(
            "granitemoehybrid",
            "granitemoehybrid",
            "GraniteMoeHybrid",
            separates_documents=False,
        ),
        Family("bamba", "bamba", "Bamba", separates_documents=False, layers_return_weights=True),
        Family("jamba", "jamba", "Jamba", separates_documents=False),
        Family(
            "falcon_h1",
            "falcon_h1",
            "FalconH1",
            beside_states=True,
            layers_return_weights=True,
            separates_documents=False,
        ),
        Family(
            "lfm2",
            "lfm2",
            "Lfm2",
            output="out_proj",
            separates_documents=False,
            activation="initializer_range",
        ),
        Family(
            "lfm2_moe",
            "lfm2_moe",
            "Lfm2Moe",
            output="out_proj",
            separates_documents=False,
            activation="initializer_range",
        ),
        Family(
            "lfm3",
            "lfm3",
            "Lfm3",
            gated=True,
            gate_per_head=True,
            per_head=("g_proj",),
            separates_documents=False,
            activation="initializer_range",
        ),
        Family("gemma3", "gemma3", "Gemma3", _MORE_THAN_TEXT),
        Family("gemma4", "gemma4", "Gemma4", _MORE_THAN_TEXT),
        Family("mistral3", "mistral3", "Mistral3", _MORE_THAN_TEXT),
        Family("qwen2_vl", "qwen2_vl", "Qwen2VL", _MORE_THAN_TEXT),
        Family("qwen2_5_vl", "qwen2_5_vl", "Qwen2_5_VL", _MORE_THAN_TEXT),
        Family("qwen3_vl", "qwen3_vl", "Qwen3VL", _MORE_THAN_TEXT),
        Family("qwen3_vl_moe", "qwen3_vl_moe", "Qwen3VLMoe", _MORE_THAN_TEXT),
        Family("qwen3_5", "qwen3_5", "Qwen3_5", _MORE_THAN_TEXT, separates_documents=False),
        Family(
            "qwen3_5_moe", "qwen3_5_moe", "Qwen3_5Moe", _MORE_THAN_TEXT, separates_documents=False
        ),
        Family("qwen2_vl_text", "qwen2_vl", "Qwen2VL", ""),
        Family("qwen2_5_vl_text", "qwen2_5_vl", "Qwen2_5_VL", ""),
        Family("qwen3_vl_text", "qwen3_vl", "Qwen3VL", ""),
        Family("qwen3_vl_moe_text", "qwen3_vl_moe", "Qwen3VLMoe", ""),
    )
}

_ENCODER = "it is an encoder, or the decoder of one"
_OWN_ATTENTION = "its attention does not go through transformers' attention interface"
_MODALITIES = "its decoder is built for speech, images or music and not for text alone"
_REASONS = {
    "bitnet": "its output projection quantises all heads by one scale",
    "gpt2": "its projections are transposed, with heads in columns",
    "gpt-sw3": "its projections are transposed, with heads in columns",
    "gpt_bigcode": "all its query heads share one KV head by a projection of their own",
    "dbrx": "its layers nest their attention",
    "diffllama": "its attention is the difference of two",
    "doge": "its attention has a mask of its own for each head",
    "jetmoe": "its queries and outputs are projected by experts",
    "mimo_v2_flash": "its values are not as wide as its keys",
    "cohere_compass_text": "it is an embedding model",
    "dots3_note": "its layers have different numbers of KV heads",
    "dots3_note_text": "its layers have different numbers of KV heads",
    "hunyuan_vl_text": "it is the text decoder of a model that is not known here as a whole",
    "paddleocr_vl_text": "it is the text decoder of a model that is not known here as a whole",
    "minimax": "its layers of linear attention have a cache of their own",
    "minimax_m3_vl_text": "its attention is sparse by blocks",
    "inkling_text": "its attention has logits of relative positions",
    "inkling2_text": "its attention has logits of relative positions",
    "zamba": "its layers share the weights of their attention",
    "zamba2": "its layers share the weights of their attention",
    "zaya": "its heads are mixed by convolutions",
    "hrm_text": "its layers are run several times in a pass",
    "rwkv": "no layer of it has full attention",
    "xlstm": "no layer of it has full attention",
    "blt": "it is several decoders in one",
    "modernbert-decoder": "its model does not name its decoder",
    "internlm3": "it is loaded as a model of type llama, with a configuration of its own",
    "iquestcoder": "it is loaded as a model of type llama, with a configuration of its own",
    "gemma4_assistant": "it reads the keys and values of another model",
    "gemma4_unified_assistant": "it reads the keys and values of another model",
    **dict.fromkeys(
        (
            "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
            "blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "marian",
            "mbart", "megatron-bert", "mvp", "pegasus", "plbart", "prophetnet", "rembert",
            "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
            "xlm-roberta-xl", "xlnet", "xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "bloom", "codegen", "cpmant", "ctrl", "falcon", "fuyu", "gpt_neo",
            "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "reformer", "xglm",
        ),
        _OWN_ATTENTION,
    ),
    **dict.fromkeys(
        (
            "emu3", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "musicgen",
            "musicgen_melody", "phi4_multimodal", "trocr", "whisper",
        ),
        _MODALITIES,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DecoderLayers:
    """What each of `count` decoder layers is, as the model's configuration says.

    `full`: the layers with full attention. The units of a head mask are their `heads` KV heads:
    row r of a mask is layer `full[r]`. `windows`: tokens that each layer which slides by itself
    sees, the query's own included. `states`: how many states of fixed size each layer of linear
    attention, convolution or the like holds, beside attention in some families. All other layers
    hold nothing. `head_dim` is that of a full layer; `own_heads` and `own_head_dim` are those of
    the layers that slide by themselves.
    """

    count: int
    full: tuple[int, ...]
    heads: int
    head_dim: int
    windows: Mapping[int, int] = field(default_factory=dict)
    states: Mapping[int, int] = field(default_factory=dict)
    own_heads: int = 0
    own_head_dim: int = 0


# Kinds of layers by transformers' names, older ones too.
_FULL = ("full_attention", "attention", "hybrid")
_SLIDING = (SLIDING, "hybrid_sliding")
_STATES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
_NOTHING = ("moe", "mlp")
LAYER_KINDS = tuple(dict.fromkeys((*_FULL, *_SLIDING, *_STATES, *_NOTHING)))

# The number of experts that a token visits, by the names that families give it.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def text_config(config: Any) -> Any:
    """Configuration of the text decoder: nested in that of a model that takes more than text."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", None) or config


def decoder_layers(config: Any) -> DecoderLayers:
    """The kinds of a decoder's layers and the sizes of their heads."""
    text = text_config(config)
    types = _layer_types(text)
    full = tuple(n for n, kind in enumerate(types) if kind in _FULL)
    sliding = [n for n, kind in enumerate(types) if kind in _SLIDING]
    heads, head_dim = _head_sizes(text, full[0] if full else None)
    own_heads, own_head_dim = _head_sizes(text, sliding[0]) if sliding else (0, 0)
    count = getattr(text, "number_of_conv_states", 1)
    return DecoderLayers(
        count=len(types),
        full=full,
        heads=heads,
        head_dim=head_dim,
        windows=dict.fromkeys(sliding, getattr(text, "sliding_window", 0)),
        states={n: count for n, kind in enumerate(types) if kind in _STATES},
        own_heads=own_heads,
        own_head_dim=own_head_dim,
    )


def _layer_types(text: Any) -> list[str]:
    """transformers' name of each layer's kind; layers that slide without a window are full.

    transformers counts a window as bosch does, the query's own position included.
    """
    types: list[str] | None = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    if types is None:
        types = [_FULL[0] if window is None else SLIDING] * text.num_hidden_layers
    return [_FULL[0] if kind == SLIDING and window is None else kind for kind in types]


def _head_sizes(text: Any, layer: int | None) -> tuple[int, int]:
    """KV heads and head dimension of a layer."""
    if layer is not None and getattr(text, "is_heterogeneous", False):
        text = text.per_layer_config[layer]
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return getattr(text, "num_key_value_heads", None) or heads, head_dim


def experts_per_token(text: Any) -> int:
    """Experts that a token visits in a layer; the most of them where layers differ."""
    count = next(count for name in EXPERTS_PER_TOKEN if (count := getattr(text, name, None)))
    return max(count) if isinstance(count, list) else int(count)


def family_of(config: Any) -> Family:
    """The family of an ordinary model; raises UserError when it cannot be made hybrid."""
    model_type = str(getattr(config, "model_type", None))
    reason = _reason(config)
    if reason:
        raise UserError(
            f"model.path: models of type '{model_type}' are not supported: {reason}; "
            f"supported are {', '.join(name for name, family in FAMILIES.items() if family.head)}"
        )
    layers = decoder_layers(config)
    if layers.windows and len(layers.windows) == layers.count:
        raise UserError(
            f"model.path: the model has a sliding window of its own ({layers.windows[0]} tokens) "
            "in every layer, so its heads are not full attention; set sliding_window to null in "
            "its config.json to start from full attention"
        )
    if not layers.full:
        raise UserError(
            f"model.path: no layer of this model of type '{model_type}' has full attention"
        )
    return FAMILIES[model_type]


def known_family(config: Any) -> Family:
    """The family of the text decoder of a model that `family_of` accepts, or of its hybrid form."""
    return FAMILIES[str(text_config(config).model_type).removeprefix(HYBRID_PREFIX)]


def _reason(config: Any) -> str | None:
    """Why a model cannot be made hybrid, as far as its configuration tells."""
    model_type, text = str(getattr(config, "model_type", None)), text_config(config)
    if model_type in _REASONS:
        return _REASONS[model_type]
    family = FAMILIES.get(model_type)
    decoder = FAMILIES.get(str(getattr(text, "model_type", None)))
    if family is not None and not family.head:
        return "it is the text decoder of a model that takes more than text; take that as a whole"
    if text is not config and family is not None and decoder is None:
        return f"its text decoder is of type '{text.model_type}'"
    if getattr(text, "kv_lora_rank", None):
        return "its heads share compressed keys and values (multi-head latent attention)"
    types = _layer_types(text) if hasattr(text, "num_hidden_layers") else []
    others = set(types) - set(LAYER_KINDS)
    if others:
        return f"it has layers of another kind ({', '.join(sorted(others))})"
    attending = (*_FULL, *_SLIDING) if family is not None else _FULL
    if types and not any(kind in attending for kind in types):
        return "no layer of it has full attention"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    if family is None and getattr(config, "text_config", None) is not None:
        return "it takes more than text; take its text model by itself"
    if family is None:
        return "its attention is not known here"
    assert decoder is not None
    if getattr(text, "attn_logit_softcapping", None) is not None and not decoder.caps_scores:
        return "it caps attention scores"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is not causal"
    if model_type == "stablelm" and getattr(text, "qk_layernorm", False):
        return "its query and key norms are a module for each head"
    return None


def has_plain_logits(config: Any) -> bool:
    """Whether attention's logits are scaled products alone: no soft-cap, no extra logit."""
    capped = getattr(text_config(config), "attn_logit_softcapping", None) is not None
    return not capped and "sinks" not in known_family(config).per_head
