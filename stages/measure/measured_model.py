"""The models that are measured, and checks that they are what the report says.

A hybrid of an original model is that model under a head mask whose full heads come first: slices,
kernels and cache are those of a materialised one, without a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from bosch.attention import HeadLayout
from bosch.backends import BACKENDS, resolve_backend
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.model.cache import HybridCache
from bosch.model.configuration import is_hybrid
from bosch.model.families import decoder_layers, has_sink_bias
from bosch.model.head_table import head_table
from bosch.model.interface import NAME, attention_modules, head_state
from bosch.model.loading import auto_class, full_attention_config, load_config, load_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from stages.measure.settings import MeasureSettings
from stages.measure.variants import Variant


@dataclass(frozen=True)
class MeasuredModel:
    """The model of a run, the cache of its keys and values, and its attention."""

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
    """The requested device; raises UserError for --device cuda without a GPU."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch finds no GPU here; leave the option out or use cpu")
    if not has_gpu or settings.device == "cpu":
        return torch.device("cpu")
    if settings.clock == "processor":
        raise UserError("--clock processor: it does not see what a GPU does; add --device cpu")
    return torch.device("cuda")


def build_model(
    path: str, original: str | None, variant: Variant, settings: MeasureSettings
) -> MeasuredModel:
    """The model of `variant`: from `path`, or the original from `original` where that is given.

    Raises UserError for what cannot be loaded, RunError for a model without the requested
    attention.
    """
    config = load_config(path)
    if variant.kind == "original":
        if is_hybrid(config):
            config = full_attention_config(config) if original is None else load_config(original)
        return _original(_load(original or path, config, settings), settings)
    backend = resolve_backend(settings.attention)
    if is_hybrid(config):
        rows = variant.kv_heads(decoder_layers(config).heads)
        config.hybrid_attention = head_table(rows, has_sink_bias(config))
        config.kv_budget = None
        model = _load(path, config, settings)
    else:
        model = _load(path, config, settings)
        prepare_for_search(model, settings.attention)
        rows = variant.kv_heads(decoder_layers(config).heads)
        choices = [np.repeat(np.arange(len(row)), list(row.values())) for row in rows]
        apply_head_mask(model, HeadMask.of_choices(choices), variant.windows)
    _check_layouts(model, variant, backend)
    return MeasuredModel(model, lambda: HybridCache.of(model), NAME, backend)


def _load(path: str, config: Any, settings: MeasureSettings) -> Any:
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
    from_config: Any = auto_class(config).from_config
    with device:
        model: Any = from_config(config, **options)
    return model.eval()


def _original(model: Any, settings: MeasureSettings) -> MeasuredModel:
    """The original under transformers' own attention, or under ours with every head full."""
    name = settings.original_attention
    if name == "auto":
        same = BACKENDS[resolve_backend(settings.attention)].aliases
        name = "flash_attention_2" if "flash_attention_2" in same else "sdpa"
    if name == "hybrid":
        prepare_for_search(model, settings.attention)
        backend = resolve_backend(settings.attention)
        return MeasuredModel(model, lambda: HybridCache.of(model), NAME, backend)
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--original-attention {name}: {reason}") from error
    if model.config._attn_implementation != name:
        raise RunError(f"the original runs {model.config._attn_implementation} and not {name}")
    new_cache = partial(DynamicCache, config=model.config)
    return MeasuredModel(model, new_cache, name, name)


def _check_layouts(model: Any, variant: Variant, backend: str) -> None:
    """Assert that each layer has the layout and the backend that will be reported."""
    rows = variant.kv_heads(decoder_layers(model.config).heads)
    for module, row in zip(attention_modules(model), rows, strict=True):
        state, expected = head_state(module), HeadLayout.deploy(row)
        if state is None or state.layout != expected or state.backend != backend:
            raise RunError(f"a layer attends by {state} and not by {expected} with {backend}")
