"""What is measured: the options of the command, and the models that follow from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from bosch.errors import UserError
from bosch.heads import swa_budget
from bosch.windows import cached_keys
from stages.configs import Count, Ratio, Section


class MeasureSettings(Section):
    """Options of one measurement; every field has a command-line option of the same name."""

    lengths: tuple[Count, ...] = Field((4096, 8192, 16384, 32768), min_length=1)
    ratios: tuple[Ratio, ...] | None = Field(None, min_length=1)
    windows: tuple[Count, ...] | None = Field(None, min_length=1)
    sinks: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = None
    clock: Literal["wall", "processor"] = "wall"
    chunk: Count = 8192
    decode_tokens: Count = 64
    batch_size: Count = 1
    repeats: Count = 3
    attention: str = "auto"
    original_attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "hybrid"
    ] = "auto"
    memory_limit: int | None = Field(None, gt=0)
    random_weights: bool = False
    seed: int = 0


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
        sinks = f", {self.sinks} sinks" if self.sinks else ""
        return f"ρ = {self.swa_ratio:.3g}, W = {self.window_size:,}{sinks}"


def checked_settings(options: dict[str, Any]) -> MeasureSettings:
    """Settings from the command's options; raises UserError that names the first faulty one."""
    try:
        return MeasureSettings(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"--{option}: {reason[:1].lower()}{reason[1:]}, found {first['input']!r}"
        ) from None


def even_layout(layers: int, heads: int, ratio: float) -> tuple[int, ...]:
    """Full KV heads of each layer when ceil(rho N) sliding ones are spread evenly over the layers.

    Speed and memory depend on how many heads of a layer slide, not on which.
    """
    budget = swa_budget(layers * heads, ratio)
    shares = [budget * (n + 1) // layers - budget * n // layers for n in range(layers)]
    return tuple(heads - sliding for sliding in shares)


def planned_variants(config: Any, settings: MeasureSettings) -> list[Variant]:
    """The original first, then every hybrid, of a model with this configuration.

    A hybrid model keeps its own layout, and its own window unless others are asked for. Raises
    UserError for options that do not fit the model, and for windows longer than a sequence.
    """
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
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


def cache_formula(
    variant: Variant, tokens: int, batch: int, heads: int, bytes_per_head: int
) -> int:
    """Bytes of the KV cache after `tokens` tokens: (1 - rho) T + rho (W - 1 + sinks) per head.

    `bytes_per_head` is what one KV head holds of one token, keys and values together. A sliding
    head that has seen fewer tokens than it may keep holds those.
    """
    full = sum(variant.full_kv_heads_per_layer)
    sliding = heads * len(variant.full_kv_heads_per_layer) - full
    entries = full * tokens
    if sliding and variant.window_size is not None:
        recent = cached_keys(variant.window_size)
        kept = tokens if tokens <= recent else recent + (variant.sinks or 0)
        entries += sliding * kept
    return entries * batch * bytes_per_head
