"""Search mode: a head mask on a loaded model, as state that changes between passes at no cost."""

from __future__ import annotations

import functools
from typing import Any

from bosch.attention import HeadLayout, resolve_backend
from bosch.errors import UserError
from bosch.families import family_of
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


def prepare_for_search(model: Any, backend: str = "auto") -> None:
    """Switch a loaded decoder to hybrid attention, every head full: the same function as before.

    Raises UserError when the family or the backend cannot be used.
    """
    family_of(model.config)
    name = resolve_backend(backend)
    register_attention()
    model.set_attn_implementation(NAME)
    model.create_masks_for_generate = masks_for_generate
    _, heads = mask_shape(model.config)
    layout = HeadLayout.search([True] * heads, window_size=1)
    for module in attention_modules(model):
        set_head_state(module, HeadState(layout, name))


def apply_head_mask(model: Any, mask: HeadMask, window_size: int, sinks: int = 0) -> None:
    """Apply `mask` to a model in search mode (BOSCH B.2); no weight is touched.

    The model is prepared by `prepare_for_search` first where it was not. Cheap to call again.
    Raises UserError when the mask does not fit the model.
    """
    modules = attention_modules(model)
    if head_state(modules[0]) is None:
        prepare_for_search(model)
    if hasattr(model.config, "hybrid_attention"):
        raise UserError("the model is hybrid already: apply head masks to the base model")
    check_mask(model.config, mask)
    for module, row in zip(modules, mask.is_full, strict=True):
        state = head_state(module)
        assert state is not None
        layout = _layout(tuple(row.tolist()), window_size, sinks)
        set_head_state(module, HeadState(layout, state.backend))


@functools.lru_cache(maxsize=1024)
def _layout(row: tuple[bool, ...], window_size: int, sinks: int) -> HeadLayout:
    """Layouts are kept, because they keep their index tensors."""
    return HeadLayout.search(row, window_size, sinks)
