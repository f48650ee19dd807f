"""The models that are measured: the original, and its hybrids by their head masks.

Hybrids of an original model are that model in search mode, with head masks whose full heads come
first, so that slices, kernels and cache are those of a materialised hybrid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from bosch.backends import resolve_backend
from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.hybrid import HybridCache
from bosch.masks import HeadMask
from bosch.model.configuration import hybrid_mask, is_hybrid
from bosch.model.loading import auto_class, full_attention_config, load_config, load_model
from bosch.model.search_mode import apply_head_mask, mask_shape, prepare_for_search
from bosch.window import Window, windows_text
from stages.measure.stage import MeasureSettings


def label(mask: HeadMask) -> str:
    """The model with a mask, in tables and messages."""
    if not mask.num_sliding:
        return "original"
    return f"ρ = {mask.swa_ratio:.3g}, W = {windows_text(mask.menu)}"


def planned_masks(config: Any, settings: MeasureSettings) -> list[HeadMask]:
    """The original's mask, with every head full, then that of every hybrid.

    A hybrid model has its own. Raises UserError for windows that are longer than a sequence or than
    attention supports.
    """
    layers, heads = mask_shape(config)
    if is_hybrid(config):
        masks = [hybrid_mask(config)]
    else:
        try:
            windows = [Window(size, settings.sinks) for size in settings.windows]
        except ValueError as error:
            raise UserError(f"--windows and --sinks: {error}") from None
        masks = [
            HeadMask.evenly(layers, heads, swa_budget(layers * heads, ratio), window)
            for ratio in settings.ratios
            for window in windows
        ]
    widest, shortest = max((w.size for m in masks for w in m.menu), default=0), settings.lengths[0]
    if widest > shortest:
        raise UserError(
            f"--lengths: a sequence of {shortest:,} tokens is shorter than a window of {widest:,}; "
            "measure longer sequences, or smaller windows (--windows)"
        )
    return list(dict.fromkeys([HeadMask.all_full(layers, heads), *masks]))


@dataclass(frozen=True)
class MeasuredModel:
    """The model of a run, a function that makes its empty KV cache, and its attention."""

    model: Any
    new_cache: Callable[[], Any]
    attention: str  # a backend of this project, or transformers' sdpa


def build_model(path: str, mask: HeadMask, settings: MeasureSettings) -> MeasuredModel:
    """The model at `path` with a mask; raises UserError when it cannot be loaded.

    The original, without sliding heads, runs transformers' sdpa; compared with eager attention any
    hybrid would look fast, so in a family without sdpa it is the hybrid with every head full.
    """
    config = load_config(path)
    if is_hybrid(config) and not mask.num_sliding:
        config = full_attention_config(config)
    model = _load(path, config, settings)
    if not mask.num_sliding and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
        return MeasuredModel(model, partial(DynamicCache, config=model.config), "sdpa")
    if not is_hybrid(config):
        prepare_for_search(model, settings.attention)
        apply_head_mask(model, mask)
    backend = resolve_backend(settings.attention)
    return MeasuredModel(model, partial(HybridCache.of, model), backend)


def _load(path: str, config: Any, settings: MeasureSettings) -> Any:
    """The model with its weights, or with random ones."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not settings.random_weights:
        return load_model(
            path, dtype=settings.dtype, backend=settings.attention, device=device, config=config
        )
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    if is_hybrid(config):
        options["attn_implementation"] = resolve_backend(settings.attention)
    torch.manual_seed(0)
    from_config: Any = auto_class(config).from_config
    with device:
        model: Any = from_config(config, **options)
    return model.eval()
