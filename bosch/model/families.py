"""Which decoder families can be made hybrid, and where each stores the weights of a head."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bosch.backends import WIDEST_HEAD
from bosch.errors import UserError


@dataclass(frozen=True)
class Family:
    """Facts about a decoder family that transformers' tables do not have.

    `takes_more_than_text`: a multimodal model, whose text decoder is also a family. `is_part`: such
    a text decoder without its own model class. `fused`: the projection that holds queries, keys and
    values in one weight, in this order. `attention` and `output`: attribute names of a layer's
    attention and of its output projection. `gated`: attention outputs are multiplied by a gate
    before the output projection. `per_head`: further parameters with equally many entries for each
    head. `norms_over_heads`: query and key norms have weights for every head, instead of one head's
    weights for all. `caps_scores`: attention scores are soft-capped. `separates_documents`: its
    masks separate packed documents according to position_ids. `mixes_states`: it also has linear
    attention, which vLLM's own class computes. `layers_return_weights`: a layer returns attention
    weights, or None, after its hidden states. `logit_factor` and `logit_divisor`: fields of the
    configuration that multiply and divide the logits. `logits_by_text`: these and the cap are in
    the text decoder's configuration. Class names come from transformers, which must be installed to
    read them.
    """

    model_type: str
    takes_more_than_text: bool = False
    is_part: bool = False
    fused: str = ""
    attention: str = "self_attn"
    output: str = "o_proj"
    gated: bool = False
    per_head: tuple[str, ...] = ()
    norms_over_heads: bool = False
    caps_scores: bool = False
    separates_documents: bool = True
    mixes_states: bool = False
    layers_return_weights: bool = False
    logit_factor: str = "logit_scale"
    logit_divisor: str = "logits_scaling"
    logits_by_text: bool = False

    @property
    def hybrid_type(self) -> str:
        """model_type of the hybrid form, which transformers does not know without bosch."""
        return HYBRID_PREFIX + self.model_type

    @property
    def is_installed(self) -> bool:
        """Whether the installed version of transformers has the family."""
        return self.model_type in _auto_table("configuration_auto", "CONFIG_MAPPING_NAMES")

    @property
    def config_class(self) -> str:
        """Name of the config class of the hybrid form."""
        names = _auto_table("configuration_auto", "CONFIG_MAPPING_NAMES")
        return f"Hybrid{names[self.model_type]}"

    @property
    def base_model_class(self) -> str:
        """Name of the model class of the family itself."""
        kind = "IMAGE_TEXT_TO_TEXT" if self.takes_more_than_text else "CAUSAL_LM"
        return _auto_table("modeling_auto", f"MODEL_FOR_{kind}_MAPPING_NAMES")[self.model_type]

    @property
    def model_class(self) -> str:
        """Name of the model class of the hybrid form."""
        return f"Hybrid{self.base_model_class}"

    @property
    def decoder_class(self) -> str:
        """Name of the hybrid form's class without a language model's head."""
        return f"Hybrid{_auto_table('modeling_auto', 'MODEL_MAPPING_NAMES')[self.model_type]}"


def _auto_table(module: str, table: str) -> Mapping[str, str]:
    """Names of classes by model_type, from transformers' auto classes; imports transformers."""
    loaded = importlib.import_module(f"transformers.models.auto.{module}")
    return getattr(loaded, table)


HYBRID_PREFIX = "hybrid_"
# Prefix of fields with a base value that config.json replaces by one that transformers refuses.
BASE_PREFIX = "base_"
SLIDING = "sliding_attention"
FULL_ATTENTION = "full_attention"

# Families that need no further facts.
_ORDINARY = (
    "apertus", "arcee", "aria_text", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "kolibri1", "llama",
    "mellum", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron",
    "olmo", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2",
)  # fmt: skip
_OTHERS = (
    *(Family(name, per_head=("sinks",)) for name in ("flint", "granite_swa", "granitemoe_swa")),
    *(
        Family(name, norms_over_heads=True)
        for name in ("cohere", "flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe")
    ),
    *(
        Family(name, gated=True, separates_documents=False, mixes_states=True)
        for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    ),
    *(Family(name, caps_scores=True) for name in ("gemma2", "vaultgemma")),
    *(Family(name, separates_documents=False) for name in ("granitemoehybrid", "jamba")),
    *(
        Family(name, output="out_proj", separates_documents=False)
        for name in ("biogpt", "lfm2", "lfm2_moe", "opt")
    ),
    Family("afmoe", gated=True, per_head=("gate_proj",), separates_documents=False),
    Family("bamba", separates_documents=False, layers_return_weights=True),
    Family("beam", gated=True, per_head=("gate_proj", "gate_bias")),
    Family(
        "falcon_h1", separates_documents=False, mixes_states=True, layers_return_weights=True,
        logit_factor="lm_head_multiplier",
    ),
    Family(
        "gpt_neox", fused="query_key_value", attention="attention", output="dense",
        per_head=("query_key_value",),
    ),
    Family("gpt_oss", per_head=("sinks",), separates_documents=False),
    Family("hyperclovax", logit_factor="logits_scaling", logit_divisor=""),
    Family("lara_mini", separates_documents=False),
    Family("laguna", gated=True, per_head=("g_proj",)),
    Family("lfm3", gated=True, per_head=("g_proj",), separates_documents=False),
    Family("nemotron_h", attention="mixer", separates_documents=False),
    Family("olmo_hybrid", norms_over_heads=True, separates_documents=False, mixes_states=True),
    Family("persimmon", fused="query_key_value", output="dense", per_head=("query_key_value",)),
    Family("phi", output="dense"),
    Family("phi3", fused="qkv_proj"),
    Family("gemma4", takes_more_than_text=True, logits_by_text=True),
    *(
        Family(name, takes_more_than_text=True)
        for name in ("gemma3", "mistral3", "qwen3_vl", "qwen3_vl_moe")
    ),
    *(
        Family(name, takes_more_than_text=True, separates_documents=False)
        for name in ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe")
    ),
    *(Family(name, is_part=True) for name in ("qwen3_vl_moe_text", "qwen3_vl_text")),
    *(
        Family(name, is_part=True, separates_documents=False)
        for name in ("qwen2_5_vl_text", "qwen2_vl_text")
    ),
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*map(Family, _ORDINARY), *_OTHERS)
}

# Why other models cannot be made hybrid, if their configuration does not show it.
_TYPES_BY_REASON = {
    "its output projection quantises all heads by one scale": ("bitnet",),
    "its projections are transposed, with heads in columns": ("gpt2", "gpt-sw3"),
    "all its query heads share one KV head by a projection of their own": ("gpt_bigcode",),
    "its layers nest their attention": ("dbrx",),
    "its attention is the difference of two": ("diffllama",),
    "its attention has a mask of its own for each head": ("doge",),
    "its queries and outputs are projected by experts": ("jetmoe",),
    "its values are not as wide as its keys": ("mimo_v2_flash",),
    "it is an embedding model": ("cohere_compass_text",),
    "its layers have different numbers of KV heads": ("dots3_note", "dots3_note_text"),
    "it is the text decoder of a model that is not known here as a whole": (
        "apertus1p5_text", "hunyuan_vl_text", "paddleocr_vl_text",
    ),
    "its layers of linear attention have a cache of their own": ("minimax",),
    "its attention is sparse by blocks": ("minimax_m3_vl_text",),
    "its attention has logits of relative positions": ("inkling_text", "inkling2_text"),
    "its layers share the weights of their attention": ("zamba", "zamba2"),
    "its heads are mixed by convolutions": ("zaya",),
    "its layers are run several times in a pass": ("dory", "hrm_text", "inkling2_loop_text"),
    "no layer of it has full attention": ("rwkv", "xlstm"),
    "it is several decoders in one": ("blt",),
    "its model does not name its decoder": ("modernbert-decoder",),
    "it is loaded as a model of another type, with a configuration of its own": (
        "exaone", "internlm3", "iquestcoder", "sarvam_moe",
    ),
    "it reads the keys and values of another model": (
        "gemma4_assistant", "gemma4_unified_assistant",
    ),
    "it is an encoder, or the decoder of one": (
        "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
        "blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "marian", "mbart",
        "megatron-bert", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta",
        "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
        "xlnet", "xmod",
    ),
    "its attention does not go through transformers' attention interface": (
        "bloom", "codegen", "cpmant", "ctrl", "falcon", "fuyu", "gpt_neo", "gpt_neox_japanese",
        "gptj", "mpt", "openai-gpt", "reformer", "xglm",
    ),
    "its decoder is built for speech, images or music and not for text alone": (
        "emu3", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "musicgen",
        "musicgen_melody", "phi4_multimodal", "trocr", "whisper",
    ),
}  # fmt: skip
_REASONS = {name: reason for reason, names in _TYPES_BY_REASON.items() for name in names}


@dataclass(frozen=True)
class DecoderLayers:
    """The kinds of `count` decoder layers, from the model's configuration.

    `full`: the layers with full attention; row r of a head mask is layer `full[r]`, with `heads` KV
    heads. `windows`: window of each layer that slides in the base model, the query's own token
    included. `states`: number of states of fixed size in each layer of linear attention,
    convolution and the like, in some families in addition to attention. All other layers store
    nothing. `head_dim` is that of a full layer; `own_heads` and `own_head_dim` are those of the
    layers that slide in the base model.
    """

    count: int
    full: tuple[int, ...]
    heads: int
    head_dim: int
    windows: Mapping[int, int] = field(default_factory=dict)
    states: Mapping[int, int] = field(default_factory=dict)
    own_heads: int = 0
    own_head_dim: int = 0


# Kinds of layers by transformers' names, older names included.
_FULL = (FULL_ATTENTION, "attention", "hybrid")
_SLIDING = (SLIDING, "hybrid_sliding")
_STATES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
_NOTHING = ("moe", "mlp")
LAYER_KINDS = tuple(dict.fromkeys((*_FULL, *_SLIDING, *_STATES, *_NOTHING)))

# Families' names of the number of experts that a token visits.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def text_config(config: Any) -> Any:
    """Configuration of the text decoder, which a multimodal model's configuration contains.

    Raises UserError if it is not a configuration: for text families transformers accepts any value.
    """
    if hasattr(config, "get_text_config"):
        text = config.get_text_config(decoder=True)
    else:
        text = getattr(config, "text_config", None) or config
    if not hasattr(text, "model_type"):
        where = getattr(config, "name_or_path", None) or "config.json"
        raise UserError(f"{where}: its text decoder is {text!r:.60}, no configuration of a model")
    return text


def max_positions(config: Any) -> int | None:
    """Positions of the text decoder with its RoPE; None if the configuration states no limit."""
    text = text_config(config)
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    return scaled_positions(str(text.model_type), positions, rope)


def rope_of(content: Mapping[str, Any]) -> Any:
    """RoPE's parameters in a config.json; transformers prefers the older name's if both are set."""
    return content.get("rope_scaling") or content.get("rope_parameters") or {}


def scaled_positions(model_type: str, positions: int | None, rope: Any) -> int | None:
    """Positions of a model whose configuration has `positions` and the parameters `rope`.

    As vLLM counts them: the factor times the original length, since model cards of Qwen and others
    add only the scaling. The positions of Gemma 3 count its factor already.
    """
    if positions is None or not isinstance(rope, Mapping) or "gemma3" in model_type:
        return positions
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in ("yarn", "linear", "dynamic") or not isinstance(factor, int | float):
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(factor * original))


def drop_idle_window(config: Any) -> None:
    """Set a window as long as all positions, as in Phi-3.5 and Phi-4-mini, to None."""
    if str(config.model_type).removeprefix(HYBRID_PREFIX) not in FAMILIES:
        return
    text, positions = text_config(config), max_positions(config)
    window: int | None = getattr(text, "sliding_window", None)
    if getattr(text, "layer_types", None) is not None:
        return
    if window and positions and window >= positions:
        text.sliding_window = None


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
    """transformers' name of each layer's kind; sliding layers without a window count as full.

    Its windows count the query's own position, as here.
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
    """Experts that a token visits in a layer; the maximum if layers differ."""
    count = next(count for name in EXPERTS_PER_TOKEN if (count := getattr(text, name, None)))
    return max(count) if isinstance(count, list) else int(count)


def family_of(config: Any) -> Family:
    """The family of an ordinary model; raises UserError when it cannot be made hybrid."""
    model_type = str(getattr(config, "model_type", None))
    reason = _reason(config)
    if reason:
        raise UserError(
            f"models of type '{model_type}' are not supported: {reason}; supported are "
            + ", ".join(sorted(name for name, other in FAMILIES.items() if not other.is_part))
        )
    layers = decoder_layers(config)
    if layers.windows and len(layers.windows) == layers.count:
        raise UserError(
            f"the model has a sliding window of its own ({layers.windows[0]} tokens) "
            "in every layer, so its heads are not full attention; set sliding_window to null in "
            "its config.json to start from full attention"
        )
    if not layers.full:
        raise UserError(f"no layer of this model of type '{model_type}' has full attention")
    return FAMILIES[model_type]


def known_family(config: Any) -> Family:
    """The family of the text decoder of a model that `family_of` accepts, or of a hybrid."""
    return FAMILIES[str(text_config(config).model_type).removeprefix(HYBRID_PREFIX)]


class LogitScale(NamedTuple):
    """Factor, divisor and cap of a model's logits; None if it has none."""

    factor: float | None
    divisor: float | None
    cap: float | None


def logit_scale(config: Any) -> LogitScale:
    """The logit scale of a model or of its hybrid form."""
    family = FAMILIES[config.model_type.removeprefix(HYBRID_PREFIX)]
    source = text_config(config) if family.logits_by_text else config
    names = (family.logit_factor, family.logit_divisor, "final_logit_softcapping")
    return LogitScale(*(getattr(source, name, None) for name in names))


def _reason(config: Any) -> str | None:
    """Why a model cannot be made hybrid, if its configuration shows it."""
    model_type, text = str(getattr(config, "model_type", None)), text_config(config)
    if model_type in _REASONS:
        return _REASONS[model_type]
    family = FAMILIES.get(model_type)
    decoder = FAMILIES.get(str(getattr(text, "model_type", None)))
    if family is not None and family.is_part:
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


def attention_needs(config: Any) -> dict[str, str]:
    """Needs of a backend, with reasons: `softcap`, `head_logits`, `wide_heads`."""
    needs = {}
    if getattr(text_config(config), "attn_logit_softcapping", None) is not None:
        needs["softcap"] = "the model has"
    if "sinks" in known_family(config).per_head:
        needs["head_logits"] = "the model has"
    layers = decoder_layers(config)
    if (dim := max(layers.head_dim, layers.own_head_dim)) > WIDEST_HEAD:
        needs["wide_heads"] = f"the model's have {dim}"
    return needs


def rope_depends_on_length(config: Any) -> bool:
    """Whether a token's RoPE depends on the last position of its pass (longrope, dynamic NTK).

    Then a text read in chunks, after a cached prefix or beside a longer row has other factors than
    in a pass of its own.
    """
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    kinds = json.dumps(rope, default=str)  # some families have a value for each kind of layer
    return '"dynamic"' in kinds or '"longrope"' in kinds


def split_fault(config: Any) -> str | None:
    """Why a sequence of this model cannot be split over processes; None if it can."""
    text = text_config(config)
    if decoder_layers(config).states:
        return "it has layers whose states pass from token to token"
    if text is not config:
        return "it takes more than text"
    if not known_family(config).separates_documents:
        return "its masks take positions that follow each other alone"
    if rope_depends_on_length(config):
        return "its RoPE depends on the length of a pass"
    if getattr(text, "attention_dropout", None):
        return "it has attention dropout"
    return None
