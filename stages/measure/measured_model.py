"""The models that are measured, and checks that they are what the report says.

A hybrid of an original model is that model under a head mask whose full heads come first: slices,
kernels and cache are those of a materialised one, without a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from transformers import DynamicCache

from bosch.attention import HeadLayout
from bosch.backends import BACKENDS, resolve_backend
from bosch.budget import even_layout
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.model.cache import HybridCache
from bosch.model.configuration import is_hybrid
from bosch.model.families import decoder_layers, has_sink_bias
from bosch.model.head_table import head_table, heads_by_window
from bosch.model.interface import NAME, attention_modules, head_state
from bosch.model.loading import auto_class, full_attention_config, load_config, load_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window, windows_text
from stages.fields import Section
from stages.measure.stage import MeasureSettings


class Variant(Section):
    """One model that is measured: the original, or a hybrid with its ratio and window."""

    kind: Literal["original", "hybrid"]
    swa_ratio: float
    window_size: int | None = None  # the widest
    sinks: int | None = None
    full_kv_heads_per_layer: tuple[int, ...]
    # Of a hybrid with several windows: all of them, ascending, and each layer's heads with each.
    window_sizes: tuple[int, ...] | None = None
    swa_kv_heads_per_layer: tuple[tuple[int, ...], ...] | None = None

    @property
    def name(self) -> str:
        """For tables and messages."""
        if self.kind == "original":
            return "original"
        return f"ρ = {self.swa_ratio:.3g}, W = {windows_text(self.windows)}"

    @property
    def windows(self) -> list[Window]:
        """The windows of sliding heads, the widest first; none of the original."""
        sizes = self.window_sizes or ([] if self.window_size is None else [self.window_size])
        return [Window(size, self.sinks or 0) for size in sizes[::-1]]

    def kv_heads(self, heads: int) -> list[dict[Window | None, int]]:
        """Heads of each layer with full attention by window, None of full ones, of `heads` each."""
        sliding = self.swa_kv_heads_per_layer or [
            [heads - full] if self.windows else [] for full in self.full_kv_heads_per_layer
        ]
        return [
            {None: full, **dict(zip(self.windows, row[::-1], strict=True))}
            for full, row in zip(self.full_kv_heads_per_layer, sliding, strict=True)
        ]


def planned_variants(config: Any, settings: MeasureSettings) -> list[Variant]:
    """The original first, then every hybrid, of a model with this configuration.

    A hybrid model keeps its own layout, and its own window unless --windows names others. Raises
    UserError for options that do not fit the model, and for windows longer than a sequence.
    """
    kinds = decoder_layers(config)
    layers, heads = len(kinds.full), kinds.heads
    table = head_table(heads_by_window(config)) if is_hybrid(config) else None
    variants = [Variant(kind="original", swa_ratio=0.0, full_kv_heads_per_layer=(heads,) * layers)]
    if table is None:
        for ratio in settings.ratios or (0.25, 0.5, 0.75, 0.875):
            for window in settings.windows or (1024,):
                counts = even_layout(layers, heads, ratio)
                variants.append(_hybrid(counts, heads, window, settings.sinks))
    else:
        if settings.ratios is not None:
            raise UserError(
                "--ratios: the model is a hybrid and is measured with its own head mask; leave the "
                "option out or name the original model"
            )
        counts = tuple(table["full_kv_heads_per_layer"])
        if "window_sizes" in table:
            if settings.windows is not None:
                raise UserError(
                    "--windows: the model's heads have several windows and are measured with "
                    "these; leave the option out"
                )
            own = _hybrid(counts, heads, table["window_sizes"][-1], table["sinks"])
            several = {
                "window_sizes": tuple(table["window_sizes"]),
                "swa_kv_heads_per_layer": tuple(map(tuple, table["swa_kv_heads_per_layer"])),
            }
            variants.append(own.model_copy(update=several))
        else:
            for window in settings.windows or (table["window_size"],):
                variants.append(_hybrid(counts, heads, window, table["sinks"]))
    widest, shortest = max(v.window_size or 0 for v in variants), min(settings.lengths)
    if widest > shortest:
        raise UserError(
            f"--windows: a window of {widest:,} tokens is longer than a sequence of {shortest:,}; "
            "measure longer sequences or smaller windows"
        )
    return list(dict.fromkeys(variants))


def _hybrid(counts: tuple[int, ...], heads: int, window: int, sinks: int) -> Variant:
    ratio = 1 - sum(counts) / (heads * len(counts))
    return Variant(
        kind="hybrid",
        swa_ratio=ratio,
        window_size=window,
        sinks=sinks,
        full_kv_heads_per_layer=counts,
    )


@dataclass(frozen=True)
class MeasuredModel:
    """The model of a run, the cache of its keys and values, and its attention."""

    model: Any
    new_cache: Callable[[], Any]
    implementation: str  # transformers' name of the attention
    backend: str  # what computes it


def chosen_device(settings: MeasureSettings) -> torch.device:
    """The requested device.

    Raises UserError for --device cuda without a GPU, and for --clock processor on one.
    """
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
    """Raise RunError unless each layer has the layout and the backend that will be reported."""
    rows = variant.kv_heads(decoder_layers(model.config).heads)
    for module, row in zip(attention_modules(model), rows, strict=True):
        state, expected = head_state(module), HeadLayout.deploy(row)
        if state is None or state.layout != expected or state.backend != backend:
            raise RunError(f"a layer attends by {state} and not by {expected} with {backend}")
