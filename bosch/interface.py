"""The entry transformers calls: attention and mask function registered under the name "bosch".

Both must be registered: transformers passes no mask at all to an attention function whose name has
no mask function.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bosch.attention import CachedStates, HeadLayout, Span, check_sinks, hybrid_attention
from bosch.windows import cached_keys, transformers_sliding_window

# A model loaded from the code file beside its weights has its own copy of all this, whose spans and
# states are of other classes; so each copy registers under a name of its own.
NAME = "bosch" if __name__ == "bosch.interface" else f"bosch_{zlib.crc32(__name__.encode()):08x}"
_STATE = "bosch_heads"
Attend: TypeAlias = Callable[[nn.Module, Tensor, Any, Any, Span | None, float], Tensor]
_REFUSED = ("position_bias",)


@dataclass(frozen=True)
class HeadState:
    """What an attention module needs to know: its layout and the backend that computes it.

    `attend`, where set, computes the attention instead, [B, T, HQ, D] from (module, query, key,
    value, span, scaling).
    """

    layout: HeadLayout
    backend: str
    attend: Attend | None = None

    def __post_init__(self) -> None:
        if self.layout.sliding:
            check_sinks(self.backend, self.layout.sinks)


def head_state(module: nn.Module) -> HeadState | None:
    """State of an attention module, None where no head mask was applied."""
    return getattr(module, _STATE, None)


def set_head_state(module: nn.Module, state: HeadState) -> None:
    """Set the state of an attention module; its weights are not touched."""
    setattr(module, _STATE, state)


def attention_modules(model: Any) -> list[nn.Module]:
    """The attention module of each layer, in order."""
    return [layer.self_attn for layer in model.get_decoder().layers]


def layouts_of(model: Any) -> list[HeadLayout]:
    """The layout of each layer of a model in search or deploy mode."""
    states = [head_state(module) for module in attention_modules(model)]
    found = [state.layout for state in states if state is not None]
    if len(found) != len(states):
        raise ValueError("no head mask is applied to this model: call bosch.apply_head_mask first")
    return found


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: Span | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: output [B, T, HQ, D] and no attention weights.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D] or what a HybridCache returned.
    """
    state = head_state(module)
    if state is None:
        raise ValueError("no head mask is applied to this model: call bosch.apply_head_mask first")
    softcap, head_logits = kwargs.get("softcap"), kwargs.get("s_aux")
    if state.attend is not None:
        if softcap is not None or head_logits is not None:
            raise ValueError("the passes of a search know only plain attention scores")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return state.attend(module, query, key, value, attention_mask, scale), None
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"hybrid attention does not support {name}")
    own, layout = kwargs.get("sliding_window"), state.layout
    if own is not None and (
        layout.full or layout.sinks or transformers_sliding_window(layout.window_size) != own
    ):
        raise ValueError(f"this layer has a window of its own, {own}, which its heads do not have")
    if attention_mask is not None and not isinstance(attention_mask, Span):
        raise ValueError("hybrid attention takes a 2-D attention mask [batch, keys], not a 4-D one")
    span = attention_mask
    if span is not None and isinstance(key, Tensor) and isinstance(value, Tensor):
        seen = span.kv_length if layout.full else cached_keys(layout.window_size) + span.q_length
        if key.shape[2] < min(seen, span.kv_length):
            raise ValueError(
                f"attention_mask covers {span.kv_length} tokens, there are keys of {key.shape[2]}"
            )
        key, value = key[:, :, : span.kv_length], value[:, :, : span.kv_length]
    out = hybrid_attention(
        query, key, value, layout, span,
        scaling=scaling, softcap=softcap, head_logits=head_logits, dropout=dropout,
        backend=state.backend,
    )  # fmt: skip
    if isinstance(key, CachedStates) and span is not None:
        key.settle(span)
    return out, None


def span_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Span:
    """transformers' mask interface: what a pass may look at, as a `Span` instead of a mask.

    `attention_mask` is the 2-D padding mask [B, Tk]. Documents packed by position_ids are found by
    asking `mask_function` whether a token sees the one before it.
    """
    if use_vmap:
        raise ValueError("hybrid attention does not support custom mask functions")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"hybrid attention takes a 2-D attention mask [batch, keys], not a "
            f"{attention_mask.ndim}-D one"
        )
    fixed = isinstance(q_offset, Tensor)  # as caches of a fixed size have it
    if isinstance(q_offset, Tensor) and (q_length == 1 or torch.compiler.is_compiling()):
        valid = None if attention_mask is None else padded_mask(attention_mask, kv_length)
        return Span(q_length, kv_length - q_length, valid, start=q_offset.clone())
    offset = int(q_offset)
    whole = attention_mask is not None and kv_length == attention_mask.shape[1] and not kv_offset
    if whole and offset == 0 and not fixed:
        offset = kv_length - q_length
    valid = None
    if attention_mask is not None:
        total = offset + q_length
        if attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, expected {total}: "
                "the past included"
            )
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
        apart = ~mask_function(rows, torch.zeros_like(rows), slots, slots - 1)
        apart = apart.expand(batch_size, -1)
        document = torch.cat([torch.zeros_like(apart[:, :1]), apart], dim=1).long().cumsum(-1)
    return Span(q_length, offset, valid, document, right_padded)


def padded_mask(attention_mask: Tensor, length: int) -> Tensor:
    """A padding mask [B, Tk] as bool [B, length]; the tokens that are still to come are real."""
    missing = length - attention_mask.shape[1]
    return nn.functional.pad(attention_mask.bool(), (0, missing), value=True)


def masks_for_generate(
    *args: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
) -> Any:
    """What `generate` hands to a pass with a cache of fixed size: the 2-D mask, of one size.

    What it means is worked out in the forward pass. transformers' own would make masks here.
    """
    if attention_mask is None or not isinstance(past_key_values.get_seq_length(), Tensor):
        return attention_mask
    return padded_mask(attention_mask, past_key_values.get_max_length())


def register_attention() -> None:
    """Make `NAME` an attention implementation of transformers; again and again is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, span_mask)
