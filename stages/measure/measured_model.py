"""The models that are measured, and checks that they are what the report says.

Hybrids of an original model are that model in search mode, with head masks whose full heads come
first, so that slices, kernels and cache are those of a materialised hybrid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import DynamicCache

from bosch.backends import resolve_backend
from bosch.budget import swa_budget
from bosch.errors import RunError, UserError
from bosch.hybrid import NAME, HeadLayout, HybridCache, deploy_order, head_state
from bosch.masks import HeadMask
from bosch.model.configuration import hybrid_mask, is_hybrid
from bosch.model.families import decoder_layers
from bosch.model.interface import attention_modules
from bosch.model.loading import auto_class, full_attention_config, load_config, load_model
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window, windows_text
from stages.fields import Section
from stages.measure.stage import DEFAULT_RATIOS, DEFAULT_WINDOW, MeasureSettings


class Variant(Section):
    """One measured model: the original, or a hybrid whose head mask has these windows and sinks."""

    kind: Literal["original", "hybrid"]
    windows: tuple[tuple[int, ...], ...]
    sinks: int = 0

    @property
    def mask(self) -> HeadMask:
        return HeadMask(self.windows, self.sinks)

    @property
    def name(self) -> str:
        """Name in tables and messages."""
        if self.kind == "original":
            return "original"
        return f"ρ = {self.mask.swa_ratio:.3g}, W = {windows_text(self.mask.menu)}"


def planned_variants(config: Any, settings: MeasureSettings) -> list[Variant]:
    """The original first, then every hybrid, of a model with this configuration.

    A hybrid model keeps its layout, and its window unless --windows names others. Raises UserError
    for options that do not fit the model, and for windows longer than a sequence or than attention
    supports.
    """
    kinds = decoder_layers(config)
    layers, heads = len(kinds.full), kinds.heads
    if is_hybrid(config):
        masks = _own_masks(hybrid_mask(config), settings)
    else:
        masks = [
            HeadMask.evenly(layers, heads, swa_budget(layers * heads, ratio), window)
            for ratio in settings.ratios or DEFAULT_RATIOS
            for window in _windows(settings.windows or (DEFAULT_WINDOW,), settings.sinks)
        ]
    widest = max((w.size for mask in masks for w in mask.menu), default=0)
    shortest = min(settings.lengths)
    if widest > shortest:
        raise UserError(
            f"--lengths: a sequence of {shortest:,} tokens is shorter than a window of {widest:,}; "
            "measure longer sequences, or smaller windows (--windows)"
        )
    original = Variant(kind="original", windows=HeadMask.all_full(layers, heads).windows)
    hybrids = [Variant(kind="hybrid", windows=mask.windows, sinks=mask.sinks) for mask in masks]
    return list(dict.fromkeys([original, *hybrids]))


def _own_masks(mask: HeadMask, settings: MeasureSettings) -> list[HeadMask]:
    """A hybrid model's mask, with each window of --windows if it has one window."""
    if settings.ratios is not None:
        raise UserError(
            "--ratios: the model is a hybrid and is measured with its own head mask; leave the "
            "option out or name the original model"
        )
    if settings.windows is None:
        return [mask]
    if len(mask.menu) > 1:
        raise UserError(
            "--windows: the model's heads have several windows and are measured with these; leave "
            "the option out"
        )
    return [HeadMask.of(mask.is_full, w) for w in _windows(settings.windows, mask.sinks)]


def _windows(sizes: Sequence[int], sinks: int) -> list[Window]:
    try:
        return [Window(size, sinks) for size in sizes]
    except ValueError as error:
        raise UserError(f"--windows and --sinks: {error}") from None


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
    mask = variant.mask
    if is_hybrid(config):
        config.hybrid_attention |= mask.content
        model = _load(path, config, settings)
    else:
        model = _load(path, config, settings)
        prepare_for_search(model, settings.attention)
        apply_head_mask(model, mask)
    backend = resolve_backend(settings.attention)
    _check_layouts(model, mask, backend)
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
    if name == "auto":  # compared with eager attention any hybrid would look fast
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


def _check_layouts(model: Any, mask: HeadMask, backend: str) -> None:
    """Raise RunError unless each layer has its row's heads by window, and the backend."""
    for module, row in zip(attention_modules(model), mask.windows, strict=True):
        state, expected = (
            head_state(module),
            HeadLayout.of([row[head] for head in deploy_order(row)], mask.sinks),
        )
        if state is None or state.layout != expected or state.backend != backend:
            raise RunError(f"a layer computes {state} and not {expected} with {backend}")
