"""Search mode: apply a head mask to a loaded model, and change it between passes at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

import bosch.attention  # noqa: F401  (registers the backends)
from bosch import hybrid
from bosch.backends import check_backend, resolve_backend
from bosch.errors import UserError
from bosch.hybrid import HeadLayout
from bosch.masks import HeadMask
from bosch.model import families
from bosch.model.interface import attention_modules

_MASK_METHOD = "create_masks_for_generate"


def mask_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """(L, HKV) of a model's configuration: its layers with full attention and their KV heads."""
    layers = families.decoder_layers(config)
    return len(layers.full), layers.heads


def check_mask(config: PreTrainedConfig, mask: HeadMask) -> None:
    """Raise UserError unless `mask` has as many layers and KV heads as the model."""
    layers, heads = mask_shape(config)
    if mask.shape != (layers, heads):
        raise UserError(
            f"the head mask is for {mask.shape[0]} layers of {mask.shape[1]} KV heads,"
            f" the model has {layers} of {heads} with full attention: search again with this model"
        )


def check_fit(config: PreTrainedConfig, mask: HeadMask) -> None:
    """Raise UserError unless the mask fits the model."""
    check_mask(config, mask)
    longest = families.max_positions(config)
    if longest is not None and mask.menu and mask.menu[0].max_keys >= longest:
        raise UserError(
            f"window_size is {mask.menu[0]}, and the model takes no more than {longest} tokens, so "
            "that no head would ever slide: choose a smaller window_size"
        )


def prepare_for_search(model: PreTrainedModel, backend: str = "auto") -> None:
    """Switch a loaded decoder to hybrid attention with every head full, which changes no output.

    Raises UserError when the family or the backend cannot be used.
    """
    families.check_family(model.config)
    name = resolve_backend(backend)
    model.get_decoder().set_attn_implementation(hybrid.NAME)  # without a model's image encoder
    setattr(_generation_model(model), _MASK_METHOD, hybrid.masks_for_generate)
    _set_layouts(model, HeadMask.all_full(*mask_shape(model.config)), name)


def _generation_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model whose `generate` runs; PEFT's wrapper uses that of the wrapped model."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


@contextmanager
def head_mask(
    model: PreTrainedModel, mask: HeadMask, backend: str | None = None
) -> Iterator[PreTrainedModel]:
    """Apply `mask` to a model within a `with` block; weights do not change (BOSCH B.2).

    At the end, also after an exception, the model has its earlier attention implementation, masks
    for `generate` and head mask again. `backend` defaults to that of the earlier head mask, or to
    "auto". Yields the model.
    Raises UserError when mask, family or backend cannot be used.
    """
    _check_not_hybrid(model)
    modules = attention_modules(model)
    states = [hybrid.head_state(module) for module in modules]
    generating = _generation_model(model)
    earlier_method = vars(generating).get(_MASK_METHOD)
    config = model.config
    parts = {**{name: getattr(config, name) for name in config.sub_configs}, "": config}
    implementations = {
        name: part._attn_implementation for name, part in parts.items() if part is not None
    }
    try:
        if backend is not None:
            prepare_for_search(model, backend)
        apply_head_mask(model, mask)
        yield model
    finally:
        model.set_attn_implementation(implementations)
        if earlier_method is not None:
            setattr(generating, _MASK_METHOD, earlier_method)
        elif _MASK_METHOD in vars(generating):
            delattr(generating, _MASK_METHOD)
        for module, state in zip(modules, states, strict=True):
            hybrid.set_head_state(module, state)


def _check_not_hybrid(model: PreTrainedModel) -> None:
    if hasattr(model.config, "hybrid_attention"):
        raise UserError("the model is hybrid already: apply head masks to the base model")


def apply_head_mask(model: PreTrainedModel, mask: HeadMask) -> None:
    """Apply `mask` to a model until another is applied (BOSCH B.2); weights do not change.

    Calls `prepare_for_search` first if needed; cheap to call again. Raises UserError when the
    mask does not fit the model.
    """
    _check_not_hybrid(model)
    modules = attention_modules(model)
    state = hybrid.head_state(modules[0])
    if state is None or model.get_decoder().config._attn_implementation != hybrid.NAME:
        prepare_for_search(model, "auto" if state is None else state.backend)
    check_fit(model.config, mask)
    _set_layouts(model, mask, hybrid.required_state(modules[0]).backend)


def _set_layouts(model: PreTrainedModel, mask: HeadMask, backend: str) -> None:
    """Give each layer its row of `mask`, or the window that it has in the base model."""
    if mask.sinks:
        check_backend(backend, {"sinks": f"its layout has {mask.sinks}"})
    kinds = families.decoder_layers(model.config)
    layouts: list[HeadLayout | None] = [None] * kinds.count
    for layer, row in zip(kinds.full, mask.windows, strict=True):
        layouts[layer] = HeadLayout.of(row, mask.sinks)
    for layer, size in kinds.windows.items():
        layouts[layer] = HeadLayout.of([size] * kinds.own_heads)
    hybrid.set_layouts(model, layouts, backend)
