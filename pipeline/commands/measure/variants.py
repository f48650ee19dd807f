"""The models of a measurement: the original and its hybrids."""

from __future__ import annotations

from typing import Any, Literal

from bosch.budget import even_layout
from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.window import Window
from pipeline.commands.measure.settings import MeasureSettings
from stages.fields import Section


class Variant(Section):
    """One model that is measured: the original, or a hybrid with its ratio and window."""

    kind: Literal["original", "hybrid"]
    swa_ratio: float
    window_size: int | None = None
    sinks: int | None = None
    full_kv_heads_per_layer: tuple[int, ...]

    @property
    def name(self) -> str:
        """For tables and messages."""
        if self.kind == "original":
            return "original"
        return f"ρ = {self.swa_ratio:.3g}, W = {self.window}"

    @property
    def window(self) -> Window | None:
        """Window of the sliding heads; None for the original, which has none."""
        return None if self.window_size is None else Window(self.window_size, self.sinks or 0)


def planned_variants(config: Any, settings: MeasureSettings) -> list[Variant]:
    """The original first, then every hybrid, of a model with this configuration.

    A hybrid model keeps its own layout, and its own window unless --windows names others. Raises
    UserError for options that do not fit the model, and for windows longer than a sequence.
    """
    kinds = decoder_layers(config)
    layers, heads = len(kinds.full), kinds.heads
    table = getattr(config, "hybrid_attention", None)
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
