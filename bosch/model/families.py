"""What a decoder's configuration says of its layers, heads, positions and logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bosch.backends import WIDEST_HEAD
from bosch.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HYBRID_PREFIX = "hybrid_"
SLIDING = "sliding_attention"
FULL_ATTENTION = "full_attention"

# Facts that no configuration states, by model_type of the text decoder: an extra logit for each
# head, masks that ignore position_ids, and fields that multiply and divide the logits.
_HEAD_LOGITS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
_IGNORE_POSITIONS = ("afmoe", "biogpt", "gpt_oss", "opt", "qwen2_5_vl_text", "qwen2_vl_text")
_LOGIT_FIELDS = {"falcon_h1": ("lm_head_multiplier", ""), "hyperclovax": ("logits_scaling", "")}

# Models that neither a configuration nor a short pass without a cache shows to be different.
_REFUSED = {
    "dory": "its layers are run several times in a pass",
    "inkling2_loop_text": "its layers are run several times in a pass",
    "mimo_v2_flash": "its values are not as wide as its keys",
    "minimax": "its layers of linear attention have a cache of their own",
    "minimax_m3_vl_text": "its attention is sparse by blocks",
    "zamba": "its layers share the weights of their attention",
    "zamba2": "its layers share the weights of their attention",
}


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


def text_config(config: PreTrainedConfig) -> Any:
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


def base_type(config: PreTrainedConfig) -> str:
    """model_type of a model, or of a hybrid's base model."""
    return str(config.model_type).removeprefix(HYBRID_PREFIX)


def max_positions(config: PreTrainedConfig) -> int | None:
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


def drop_idle_window(config: PreTrainedConfig) -> None:
    """Set a window as long as all positions, as in Phi-3.5 and Phi-4-mini, to None."""
    text = text_config(config)
    if getattr(text, "layer_types", None) is not None:
        return
    window, positions = getattr(text, "sliding_window", None), max_positions(config)
    if window and positions and window >= positions:
        text.sliding_window = None


def decoder_layers(config: PreTrainedConfig) -> DecoderLayers:
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


def _layer_types(text: PreTrainedConfig) -> list[str]:
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


def _head_sizes(text: PreTrainedConfig, layer: int | None) -> tuple[int, int]:
    """KV heads and head dimension of a layer."""
    if layer is not None and getattr(text, "is_heterogeneous", False):
        text = text.per_layer_config[layer]
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return getattr(text, "num_key_value_heads", None) or heads, head_dim


def experts_per_token(text: PreTrainedConfig) -> int:
    """Experts that a token visits in a layer; the maximum if layers differ."""
    count = next(count for name in EXPERTS_PER_TOKEN if (count := getattr(text, name, None)))
    return max(count) if isinstance(count, list) else int(count)


def check_family(config: PreTrainedConfig) -> None:
    """Raise UserError if the configuration shows that a model cannot be made hybrid.

    Whether its heads can be told apart is measured on the model (`bosch.model.head_weights`).
    """
    reason = _reason(config)
    if reason is not None:
        raise UserError(f"models of type '{config.model_type}' cannot be made hybrid: {reason}")


def _reason(config: PreTrainedConfig) -> str | None:
    text = text_config(config)
    if text.model_type in _REFUSED:
        return _REFUSED[text.model_type]
    if getattr(text, "kv_lora_rank", None):
        return "its heads share compressed keys and values (multi-head latent attention)"
    kinds = set(_layer_types(text))
    if others := kinds - set(LAYER_KINDS):
        return f"it has layers of another kind ({', '.join(sorted(others))})"
    if not kinds & {*_FULL, *_SLIDING}:
        return "no layer of it has full attention"
    layers = decoder_layers(config)
    if not layers.full:
        window = next(iter(layers.windows.values()))
        return (
            f"it has a sliding window of its own ({window} tokens) in every layer; set "
            "sliding_window to null in its config.json to start from full attention"
        )
    if any(_head_sizes(text, layer)[0] != layers.heads for layer in layers.full):
        return "its layers have different numbers of KV heads"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is not causal"
    return None


class LogitScale(NamedTuple):
    """Factor, divisor and cap of a model's logits; None if it has none."""

    factor: float | None
    divisor: float | None
    cap: float | None


def logit_scale(config: PreTrainedConfig) -> LogitScale:
    """The logit scale of a model or of its hybrid form."""
    source = text_config(config) if base_type(config) == "gemma4" else config
    scales = _LOGIT_FIELDS.get(base_type(config), ("logit_scale", "logits_scaling"))
    fields = (*scales, "final_logit_softcapping")
    return LogitScale(*(getattr(source, name, None) for name in fields))


def attention_needs(config: PreTrainedConfig) -> dict[str, str]:
    """Needs of a backend, with reasons: `softcap`, `head_logits`, `wide_heads`."""
    needs, text, layers = {}, text_config(config), decoder_layers(config)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        needs["softcap"] = "the model has"
    if base_type(text) in _HEAD_LOGITS:
        needs["head_logits"] = "the model has"
    if (dim := max(layers.head_dim, layers.own_head_dim)) > WIDEST_HEAD:
        needs["wide_heads"] = f"the model's have {dim}"
    return needs


def mixes_documents(config: PreTrainedConfig) -> bool:
    """Whether packed documents see each other although position_ids restart."""
    measured = getattr(config, "hybrid_attention", None) or {}
    known = base_type(text_config(config)) in _IGNORE_POSITIONS
    return known or bool(measured.get("mixes_documents") or decoder_layers(config).states)


def rope_depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether a token's RoPE depends on the last position of its pass (longrope, dynamic NTK).

    Then a text read in chunks, after a cached prefix or beside a longer row has other factors than
    in a pass of its own.
    """
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    kinds = json.dumps(rope, default=str)  # some families have a value for each kind of layer
    return '"dynamic"' in kinds or '"longrope"' in kinds


def split_fault(config: PreTrainedConfig) -> str | None:
    """Why a sequence of this model cannot be split over processes; None if it can."""
    text = text_config(config)
    if decoder_layers(config).states:
        return "it has layers whose states pass from token to token"
    if text is not config:
        return "it takes more than text"
    if mixes_documents(config):
        return "its masks take positions that follow each other alone"
    if rope_depends_on_length(config):
        return "its RoPE depends on the length of a pass"
    if getattr(text, "attention_dropout", None):
        return "it has attention dropout"
    return None
