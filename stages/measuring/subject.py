"""The models that are measured, and proof that they are what the report will say.

A hybrid of an original model is that model under a head mask whose full heads come first: slices,
kernels and cache are those of a materialised one, without a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bosch.attention import HeadLayout, resolve_backend
from bosch.cache import HybridCache
from bosch.configuration import is_hybrid
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.interface import NAME, attention_modules, head_state
from bosch.modeling import (
    apply_head_mask,
    full_attention_config,
    layouts_of,
    load_config,
    load_model,
    prepare_for_search,
)
from stages.measuring.settings import MeasureSettings, Variant


@dataclass(frozen=True)
class Subject:
    """The model of a point, what it keeps its keys and values in, and how it attends."""

    model: Any
    new_cache: Callable[[], Any]
    implementation: str  # transformers' name of the attention
    backend: str  # what computes it

    def describe(self, kernels: list[str]) -> dict[str, Any]:
        return {
            "implementation": self.implementation,
            "backend": self.backend,
            "cache": type(self.new_cache()).__name__,
            "kernels": kernels,
        }


def chosen_device(settings: MeasureSettings) -> torch.device:
    """The device asked for; raises UserError when there is no GPU and one is asked for."""
    found = torch.cuda.is_available()
    if settings.device == "cuda" and not found:
        raise UserError("--device cuda: torch finds no GPU here; leave the option out or use cpu")
    if not found or settings.device == "cpu":
        return torch.device("cpu")
    if settings.clock == "processor":
        raise UserError("--clock processor: it does not see what a GPU does; add --device cpu")
    return torch.device("cuda")


def build_subject(
    path: str, original: str | None, variant: Variant, settings: MeasureSettings
) -> Subject:
    """The model of `variant`: from `path`, or the original from `original` where that is given.

    Raises UserError for what cannot be loaded or is not there, RunError when the model is not what
    was asked for.
    """
    config = load_config(path)
    if variant.kind == "original":
        if is_hybrid(config):
            config = full_attention_config(config) if original is None else load_config(original)
        return _original(_make(original or path, config, settings), settings)
    backend = resolve_backend(settings.attention)
    if is_hybrid(config):
        config.hybrid_attention = {**config.hybrid_attention, "window_size": variant.window_size}
        model = _make(path, config, settings)
    else:
        model = _make(path, config, settings)
        prepare_for_search(model, settings.attention)
        heads = config.num_key_value_heads
        rows = [[h < full for h in range(heads)] for full in variant.full_kv_heads_per_layer]
        assert variant.window_size is not None and variant.sinks is not None
        apply_head_mask(model, HeadMask(np.array(rows)), variant.window_size, variant.sinks)
    _check_layouts(model, variant, backend)
    return Subject(model, lambda: HybridCache(layouts_of(model)), NAME, backend)


def _make(path: str, config: Any, settings: MeasureSettings) -> Any:
    """The model with its weights, or with random ones."""
    device = chosen_device(settings)
    if not settings.random_weights:
        return load_model(
            path, dtype=settings.dtype, backend=settings.attention, device=device, config=config
        )
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    if is_hybrid(config):
        options["attn_implementation"] = resolve_backend(settings.attention)
    torch.manual_seed(settings.seed)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()


def _original(model: Any, settings: MeasureSettings) -> Subject:
    """The original under transformers' own attention, or under ours with every head full."""
    asked = settings.original_attention
    if asked == "auto":
        flash = resolve_backend(settings.attention) == "flash"
        asked = "flash_attention_2" if flash else "sdpa"
    if asked == "hybrid":
        prepare_for_search(model, settings.attention)
        backend = resolve_backend(settings.attention)
        return Subject(model, lambda: HybridCache(layouts_of(model)), NAME, backend)
    try:
        model.set_attn_implementation(asked)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--original-attention {asked}: {reason}") from error
    if model.config._attn_implementation != asked:
        raise RunError(f"the original runs {model.config._attn_implementation} and not {asked}")
    return Subject(model, DynamicCache, asked, asked)


def _check_layouts(model: Any, variant: Variant, backend: str) -> None:
    """Assert that each layer has the layout and the backend that will be reported."""
    for module, full in zip(attention_modules(model), variant.full_kv_heads_per_layer, strict=True):
        state = head_state(module)
        heads = model.config.num_key_value_heads
        expected = HeadLayout.deploy(full, heads, variant.window_size or 1, variant.sinks or 0)
        if state is None or state.layout != expected or state.backend != backend:
            raise RunError(f"a layer attends by {state} and not by {expected} with {backend}")
