"""Search mode: a head mask on a loaded model, as state that changes between passes at no cost."""

from __future__ import annotations

import functools
from typing import Any

from bosch.attention import HeadLayout, resolve_backend
from bosch.errors import UserError
from bosch.families import base_windows, family_of
from bosch.heads import HeadMask
from bosch.interface import (
    NAME,
    HeadState,
    attention_modules,
    head_state,
    masks_for_generate,
    register_attention,
    set_head_state,
)
from bosch.windows import check_window

_OWN_HEADS = "bosch_own_kv_heads"


def mask_shape(config: Any) -> tuple[int, int]:
    """(L, HKV) of a model's configuration."""
    return config.num_hidden_layers, config.num_key_value_heads


def check_mask(config: Any, mask: HeadMask) -> None:
    """Raise UserError unless `mask` has as many layers and KV heads as the model."""
    layers, heads = mask_shape(config)
    if (mask.num_layers, mask.num_key_value_heads) != (layers, heads):
        raise UserError(
            f"the head mask is for {mask.num_layers} layers of {mask.num_key_value_heads} KV heads,"
            f" the model has {layers} of {heads}: search again with this model"
        )


def set_own_kv_heads(model: Any, heads: slice) -> None:
    """Say which KV heads of each layer this process computes, of a model that is sharded."""
    setattr(model, _OWN_HEADS, heads)


def own_kv_heads(model: Any) -> slice | None:
    """The KV heads of each layer that this process computes; None where these are all."""
    return getattr(model, _OWN_HEADS, None)


def own_row(model: Any, row: Any) -> Any:
    """The part of a row [HKV] of a mask that this process computes."""
    heads = own_kv_heads(model)
    return row if heads is None else row[heads]


def effective_mask(config: Any, mask: HeadMask, window_size: int, sinks: int) -> HeadMask:
    """`mask` with every head sliding in the layers that slide in the base model too.

    Raises UserError when mask, window or sinks do not fit, or when those layers' own window is
    larger than `window_size`, so that their heads would see more than a sliding head may.
    """
    check_mask(config, mask)
    _check_reach(config, window_size, sinks)
    for layer, own in enumerate(base_windows(config)):
        if own is None:
            continue
        if own > window_size:
            raise UserError(
                f"window_size is {window_size}, and layer {layer} of the model slides by itself "
                f"with a window of {own}: choose a window_size of at least {own}"
            )
        mask = mask.with_layer(layer, [False] * mask.num_key_value_heads)
    return mask


def _check_reach(config: Any, window_size: int, sinks: int) -> None:
    """Raise UserError for a window that is none, or that holds all the model can take."""
    try:
        check_window(window_size, sinks)
    except ValueError as error:
        raise UserError(str(error)) from error
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and window_size + sinks >= longest:
        words = f"{window_size} with {sinks} sinks" if sinks else f"{window_size}"
        raise UserError(
            f"window_size is {words}, and the model takes no more than {longest} tokens, so that "
            "no head would ever slide: choose a smaller window_size"
        )


def prepare_for_search(model: Any, backend: str = "auto") -> None:
    """Switch a loaded decoder to hybrid attention, every head full: the same function as before.

    Raises UserError when the family or the backend cannot be used.
    """
    family_of(model.config)
    name = resolve_backend(backend)
    register_attention()
    model.set_attn_implementation(NAME)
    model.create_masks_for_generate = masks_for_generate
    _set_layouts(model, HeadMask.all_full(*mask_shape(model.config)), 1, 0, name)


def apply_head_mask(model: Any, mask: HeadMask, window_size: int, sinks: int = 0) -> None:
    """Apply `mask` to a model in search mode (BOSCH B.2); no weight is touched.

    The model is prepared by `prepare_for_search` first where it was not. Cheap to call again.
    Raises UserError when mask, window or sinks do not fit the model.
    """
    modules = attention_modules(model)
    if head_state(modules[0]) is None:
        prepare_for_search(model)
    if hasattr(model.config, "hybrid_attention"):
        raise UserError("the model is hybrid already: apply head masks to the base model")
    mask = effective_mask(model.config, mask, window_size, sinks)
    state = head_state(modules[0])
    assert state is not None
    _set_layouts(model, mask, window_size, sinks, state.backend)


def _set_layouts(model: Any, mask: HeadMask, window_size: int, sinks: int, backend: str) -> None:
    """Give each layer its row of `mask`, or its own window where it has one in the base model."""
    windows = base_windows(model.config)
    for module, row, own in zip(attention_modules(model), mask.is_full, windows, strict=True):
        heads = own_row(model, row.tolist() if own is None else [False] * len(row))
        size, kept = (window_size, sinks) if own is None else (own, 0)
        set_head_state(module, HeadState(_layout(tuple(heads), size, kept), backend))


@functools.lru_cache(maxsize=1024)
def _layout(row: tuple[bool, ...], window_size: int, sinks: int) -> HeadLayout:
    """Layouts are kept, because they keep their index tensors."""
    return HeadLayout.search(row, window_size, sinks)
