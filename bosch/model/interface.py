"""Attention and mask function for transformers, registered under one name, "bosch".

transformers passes no mask to an attention function that has no mask function of the same name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bosch.attention import (
    AttentionCall,
    AttentionContext,
    CachedStates,
    HeadLayout,
    LogitTransform,
    attention_weights,
    check_sinks,
    compute_attention,
    pass_context,
)
from bosch.errors import UserError
from bosch.model.families import base_type, decoder_layers
from bosch.window import Window

# A model's code file has a copy of these modules, with its own classes and its own name for them.
NAME = (
    "bosch" if __name__ == "bosch.model.interface" else f"bosch_{zlib.crc32(__name__.encode()):08x}"
)
_STATE = "bosch_heads"
Attend: TypeAlias = Callable[[nn.Module, AttentionCall], Tensor]
# Modules that do not get `output_attentions`; with eager they return weights, as in transformers.
_ALWAYS_RETURN_WEIGHTS = (
    "NemotronAttention", "OPTAttention", "PersimmonAttention", "StableLmAttention",
)  # fmt: skip


@dataclass(frozen=True)
class HeadState:
    """A module's layout and backend; `attend`, if set, computes [B, T, HQ, D], without dropout."""

    layout: HeadLayout
    backend: str
    attend: Attend | None = None

    def __post_init__(self) -> None:
        check_sinks(self.backend, self.layout.sinks)


def head_state(module: nn.Module) -> HeadState | None:
    """State of an attention module; None if no head mask was applied."""
    return getattr(module, _STATE, None)


def required_state(module: nn.Module) -> HeadState:
    """State of an attention module; raises ValueError where no head mask was applied."""
    state = head_state(module)
    if state is None:
        raise ValueError("no head mask is applied to this model: call bosch.apply_head_mask first")
    return state


def set_head_state(module: nn.Module, state: HeadState | None) -> None:
    """Set the state of an attention module, None to remove it; weights do not change."""
    if state is not None:
        setattr(module, _STATE, state)
    elif hasattr(module, _STATE):
        delattr(module, _STATE)


def attention_modules(model: Any) -> list[nn.Module]:
    """The attention modules of layers with full attention, one for each row of a head mask."""
    return [attention_module(model, layer) for layer in decoder_layers(model.config).full]


def attention_module(model: Any, layer: int) -> nn.Module:
    """The attention module of a decoder layer; UserError if it is not clear which it is."""
    layers = getattr(model.get_decoder(), "layers", None)
    children = [] if layers is None else layers[layer].children()
    found = [child for child in children if "Attention" in type(child).__name__]
    if len(found) != 1:
        raise UserError(
            f"models of type '{base_type(model.config)}' cannot be made hybrid: layer {layer} of "
            f"their decoder has {len(found)} modules of attention"
        )
    return found[0]


def set_layouts(model: Any, layouts: Sequence[HeadLayout | None], backend: str) -> None:
    """Set the layout and backend of each decoder layer; None is a layer without attention."""
    for layer, layout in enumerate(layouts):
        if layout is not None:
            set_head_state(attention_module(model, layer), HeadState(layout, backend))


def layouts_of(model: Any) -> list[HeadLayout | None]:
    """Layouts of all layers in search or deploy mode, None for a layer without attention."""
    kinds = decoder_layers(model.config)
    layouts: list[HeadLayout | None] = [None] * kinds.count
    for layer in (*kinds.full, *kinds.windows):
        layouts[layer] = required_state(attention_module(model, layer)).layout
    return layouts


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: AttentionContext | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: output [B, T, HQ, D], and weights [B, HQ, T, Tk].

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D], or states from a HybridCache. Weights are None
    unless `output_attentions` is set; raises UserError if the backend has none.
    """
    state = required_state(module)
    layout, context = state.layout, attention_mask
    _check_supported(layout, kwargs)
    with_weights = kwargs.get("output_attentions")
    if with_weights is None:
        with_weights = getattr(getattr(module, "config", None), "output_attentions", None)
    if with_weights:
        check_shows_weights(state)
    elif type(module).__name__ in _ALWAYS_RETURN_WEIGHTS:
        with_weights = state.backend == "eager" and state.attend is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    transform = LogitTransform(scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    if context is None or isinstance(context, AttentionContext):
        context = pass_context(context, query, key)
    dropout = dropout if state.attend is None else 0.0
    call = AttentionCall(query, key, value, layout, context, transform, state.backend, dropout)
    if state.attend is not None:
        return state.attend(module, call), None
    if not isinstance(context, AttentionContext):
        raise ValueError("hybrid attention takes a 2-D attention mask [batch, keys], not a 4-D one")
    if attention_mask is not None and isinstance(key, Tensor) and isinstance(value, Tensor):
        length = context.kv_length
        reaches = [length] if layout.has_full else [window.past for window in layout.windows]
        if key.shape[2] < max(context.covered, min(length, max(reaches) + context.q_length)):
            raise ValueError(
                f"attention_mask covers {max(context.covered, length)} tokens, there are keys of "
                f"{key.shape[2]}"
            )
        call = call._replace(key=key[:, :, :length], value=value[:, :, :length])
    weights = attention_weights(call) if with_weights else None
    out = compute_attention(call)
    if isinstance(key, CachedStates) and attention_mask is not None:
        key.settle(context)
    return out, weights


def _check_supported(layout: HeadLayout, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a layer that hybrid attention does not support."""
    if options.get("position_bias") is not None:
        raise ValueError("hybrid attention does not support position_bias")
    base_window = options.get("sliding_window")
    if base_window is not None and (layout.has_full or layout.windows != (Window(base_window),)):
        raise ValueError(
            f"this layer has a window of its own, {base_window}, which its heads do not have"
        )


def check_shows_weights(state: HeadState) -> None:
    """Raise UserError if the backend cannot return attention weights."""
    if state.backend != "eager" or state.attend is not None:
        raise UserError(
            f"output_attentions: the {state.backend} backend computes no attention weights; load "
            "the model with attn_implementation='eager', or call set_attn_implementation('eager')"
        )


def context_of_pass(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> AttentionContext:
    """transformers' mask interface: an `AttentionContext` instead of a mask.

    `attention_mask` is the 2-D padding mask [B, Tk]. Documents packed by position_ids are found
    with `mask_function`: a token that does not see the one before it begins a document.
    """
    if use_vmap:
        raise ValueError("hybrid attention does not support custom mask functions")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"hybrid attention takes a 2-D attention mask [batch, keys], not a "
            f"{attention_mask.ndim}-D one"
        )
    if isinstance(q_offset, Tensor) and (q_length == 1 or torch.compiler.is_compiling()):
        valid = None if attention_mask is None else padded_mask(attention_mask, kv_length)
        return AttentionContext(q_length, kv_length - q_length, valid, start=q_offset.clone())
    offset = int(q_offset)
    valid, covered = None, 0
    if attention_mask is not None:
        total = offset + q_length
        if attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, expected {total}: "
                "the past included"
            )
        # May exceed the pass: free slots of a cache, or a past that does not exist.
        covered = kv_length if attention_mask.shape[1] == kv_length else 0
        valid = attention_mask[:, :total].bool()
        valid = None if bool(valid.all()) else valid
    document = None
    right_padded = (
        valid is not None and offset == 0 and not bool((valid.diff(dim=1) & valid[:, 1:]).any())
    )
    packable = attention_mask is None and offset == 0 and q_length > 1
    if packable and not allow_is_causal_skip and mask_function is not None:
        rows = torch.arange(batch_size, device=device)[:, None]
        slots = torch.arange(1, q_length, device=device)[None]
        begins = ~mask_function(rows, torch.zeros_like(rows), slots, slots - 1)
        begins = begins.expand(batch_size, -1)
        document = nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)
    return AttentionContext(q_length, offset, valid, document, right_padded, covered=covered)


def padded_mask(attention_mask: Tensor, length: int) -> Tensor:
    """A padding mask [B, Tk] as bool [B, length]; future tokens count as real."""
    missing = length - attention_mask.shape[1]
    return nn.functional.pad(attention_mask.bool(), (0, missing), value=True)


def masks_for_generate(
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """The mask `generate` passes with a static cache: the 2-D padding mask.

    It is padded to the cache's length; transformers' own function would build a 4-D mask. Before
    5.24 `cache` is `past_key_values`.
    """
    cache = past_key_values if cache is None else cache
    if attention_mask is None or not isinstance(cache.get_seq_length(), Tensor):
        return attention_mask
    # Layers with states read the padding of this pass at the end of the mask.
    if inputs_embeds.shape[1] > 1 and decoder_layers(config).states:
        return attention_mask
    return padded_mask(attention_mask, cache_room(cache))


def cache_room(cache: Any) -> int:
    """Tokens that a fixed cache has room for; get_max_length is -1 for layers that hold states."""
    return max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)


def register_attention() -> None:
    """Register `NAME` as attention implementation of transformers; harmless when called again."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, context_of_pass)
