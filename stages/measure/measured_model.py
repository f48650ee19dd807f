"""The models that are measured, and checks that they are what the report says.

Hybrids of an original model are that model in search mode, with head masks whose full heads come
first, so that slices, kernels and cache are those of a materialised hybrid.
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
from bosch.model.families import decoder_layers
from bosch.model.head_table import head_counts, head_table, heads_by_window
from bosch.model.interface import NAME, attention_modules, head_state
from bosch.model.loading import auto_class, full_attention_config, load_config, load_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window, windows_text
from stages.fields import Section
from stages.measure.stage import DEFAULT_RATIOS, DEFAULT_WINDOW, MeasureSettings


class Variant(Section):
    """One measured model: the original, or a hybrid with its ratio and window."""

    kind: Literal["original", "hybrid"]
    swa_ratio: float
    window_size: int | None = None  # the widest of several
    sinks: int | None = None
    full_kv_heads_per_layer: tuple[int, ...]
    # With several windows: their sizes, ascending, and the number of heads of each layer with each.
    window_sizes: tuple[int, ...] | None = None
    swa_kv_heads_per_layer: tuple[tuple[int, ...], ...] | None = None

    @property
    def name(self) -> str:
        """Name in tables and messages."""
        if self.kind == "original":
            return "original"
        return f"ρ = {self.swa_ratio:.3g}, W = {windows_text(self.windows)}"

    @property
    def windows(self) -> list[Window]:
        """The windows of sliding heads, the widest first; an original has none."""
        sizes = self.window_sizes or ([] if self.window_size is None else [self.window_size])
        return [Window(size, self.sinks or 0) for size in sizes[::-1]]

    def kv_heads(self, heads: int) -> list[dict[Window | None, int]]:
        """KV heads by window (None: full), a row for each layer; a layer has `heads` of them."""
        sliding = self.swa_kv_heads_per_layer or [
            [heads - full] if self.windows else [] for full in self.full_kv_heads_per_layer
        ]
        return [
            {None: full, **dict(zip(self.windows, row[::-1], strict=True))}
            for full, row in zip(self.full_kv_heads_per_layer, sliding, strict=True)
        ]


def planned_variants(config: Any, settings: MeasureSettings) -> list[Variant]:
    """The original first, then every hybrid, of a model with this configuration.

    A hybrid model keeps its layout, and its window unless --windows names others. Raises UserError
    for options that do not fit the model, and for windows longer than a sequence or than attention
    supports.
    """
    kinds = decoder_layers(config)
    layers, heads = len(kinds.full), kinds.heads
    if is_hybrid(config):
        hybrids = _own_layout(config, heads, settings)
    else:
        hybrids = [
            _hybrid(even_layout(layers, heads, ratio), heads, window, settings.sinks)
            for ratio in settings.ratios or DEFAULT_RATIOS
            for window in settings.windows or (DEFAULT_WINDOW,)
        ]
    widest, shortest = max(hybrid.window_size or 0 for hybrid in hybrids), min(settings.lengths)
    if widest > shortest:
        raise UserError(
            f"--lengths: a sequence of {shortest:,} tokens is shorter than a window of {widest:,}; "
            "measure longer sequences, or smaller windows (--windows)"
        )
    original = Variant(kind="original", swa_ratio=0.0, full_kv_heads_per_layer=(heads,) * layers)
    return list(dict.fromkeys([original, *hybrids]))


def _own_layout(config: Any, heads: int, settings: MeasureSettings) -> list[Variant]:
    """A hybrid model's layout, with each window of --windows if the layout has one window."""
    if settings.ratios is not None:
        raise UserError(
            "--ratios: the model is a hybrid and is measured with its own head mask; leave the "
            "option out or name the original model"
        )
    table = head_counts(heads_by_window(config))
    counts, sinks = tuple(table["full_kv_heads_per_layer"]), table["sinks"]
    if "window_sizes" not in table:
        sizes = settings.windows or (table["window_size"],)
        return [_hybrid(counts, heads, size, sinks) for size in sizes]
    if settings.windows is not None:
        raise UserError(
            "--windows: the model's heads have several windows and are measured with these; leave "
            "the option out"
        )
    more_fields = {
        "window_sizes": tuple(table["window_sizes"]),
        "swa_kv_heads_per_layer": tuple(map(tuple, table["swa_kv_heads_per_layer"])),
    }
    widest = table["window_sizes"][-1]
    return [_hybrid(counts, heads, widest, sinks).model_copy(update=more_fields)]


def _hybrid(counts: tuple[int, ...], heads: int, window_size: int, sinks: int) -> Variant:
    try:
        Window(window_size, sinks)
    except ValueError as error:
        raise UserError(f"--windows and --sinks: {error}") from None
    return Variant(
        kind="hybrid",
        swa_ratio=1 - sum(counts) / (heads * len(counts)),
        window_size=window_size,
        sinks=sinks,
        full_kv_heads_per_layer=counts,
    )


@dataclass(frozen=True)
class MeasuredModel:
    """The model of a run, a function that makes its empty KV cache, and its attention."""

    model: Any
    new_cache: Callable[[], Any]
    implementation: str  # transformers' name of the attention
    backend: str  # a backend of this project, or the implementation itself


def chosen_device(settings: MeasureSettings) -> torch.device:
    """The device of --device; auto is a GPU where there is one.

    Raises UserError for --device cuda without a GPU, and for --clock processor with one.
    """
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch finds no GPU here; leave the option out or use cpu")
    if not has_gpu or settings.device == "cpu":
        return torch.device("cpu")
    if settings.clock == "processor":
        raise UserError("--clock processor: it does not count the work of a GPU; add --device cpu")
    return torch.device("cuda")


def build_model(
    path: str, original: str | None, variant: Variant, settings: MeasureSettings
) -> MeasuredModel:
    """The model of `variant`: from `path`, or the original from `original` if given.

    Raises UserError when it cannot be loaded, RunError when it lacks the requested attention.
    """
    config = load_config(path)
    if variant.kind == "original":
        if is_hybrid(config):
            config = full_attention_config(config) if original is None else load_config(original)
        return _original(_load(original or path, config, settings), settings)
    rows = variant.kv_heads(decoder_layers(config).heads)
    if is_hybrid(config):
        windows = [[w for w, count in row.items() for _ in range(count)] for row in rows]
        config.hybrid_attention = head_table(windows)
        model = _load(path, config, settings)
    else:
        model = _load(path, config, settings)
        prepare_for_search(model, settings.attention)
        choices = [np.repeat(np.arange(len(row)), list(row.values())) for row in rows]
        apply_head_mask(model, HeadMask.of_choices(choices), variant.windows)
    backend = resolve_backend(settings.attention)
    _check_layouts(model, rows, backend)
    return MeasuredModel(model, partial(HybridCache.of, model), NAME, backend)


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
    """The original with transformers' attention, or with this project's and every head full."""
    name, backend = settings.original_attention, resolve_backend(settings.attention)
    if name == "auto" and "flash_attention_2" in BACKENDS[backend].aliases:
        name = "flash_attention_2"
    elif name == "auto":  # compared with eager attention any hybrid would look fast
        name = "sdpa" if model._supports_sdpa else "hybrid"
    if name == "hybrid":
        prepare_for_search(model, settings.attention)
        return MeasuredModel(model, partial(HybridCache.of, model), NAME, backend)
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--original-attention {name}: {reason}") from error
    if model.config._attn_implementation != name:
        raise RunError(f"the original runs {model.config._attn_implementation} and not {name}")
    new_cache = partial(DynamicCache, config=model.config)
    return MeasuredModel(model, new_cache, name, name)


def _check_layouts(model: Any, rows: list[dict[Window | None, int]], backend: str) -> None:
    """Raise RunError unless each layer has its row's heads by window, and the backend."""
    for module, row in zip(attention_modules(model), rows, strict=True):
        state, expected = head_state(module), HeadLayout.deploy(row)
        if state is None or state.layout != expected or state.backend != backend:
            raise RunError(f"a layer computes {state} and not {expected} with {backend}")
