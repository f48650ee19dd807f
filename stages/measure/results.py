"""efficiency.json, its table and its figures from the runs of each point.

The figures are BOSCH's Figures 5 and 6 (C.4): throughput and memory over the length of the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from bosch.masks import HeadMask
from bosch.window import Window, windows_text
from stages.formats import format_bytes, format_count, format_length
from stages.measure.measured_model import Variant
from stages.measure.stage import OverOriginal
from stages.pages.charts import Axis, Picture, Style, curves, save_panels, styles, values
from stages.pages.tables import Group, Table

_HEADER = (
    "length", "ρ", "W", "prefill\ntokens/s", "decode\ntokens/s", "token\np90, ms",
    "peak\nmemory", "KV\ncache", "per\ntoken",
)  # fmt: skip

_RUN_FIGURES = ("prefill_seconds", "token_seconds", "memory_peak_bytes", "memory_p90_bytes")


def point_of(
    variant: Variant, length: int, batch: int, runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One point: medians over its runs, and the figures of each run.

    Tokens per second count all rows of the batch. `kv_cache_bytes_per_token` is the cache's bytes
    divided by the tokens of the prompt.
    """
    point: dict[str, Any] = {"model": variant.kind, **variant.mask.content, "length": length}
    reason = next((run["out_of_memory"] for run in runs if "out_of_memory" in run), None)
    point |= {"out_of_memory": reason is not None, "out_of_memory_reason": reason}
    if reason is not None:
        return point
    prefill_seconds = [run["prefill_seconds"] for run in runs]
    token_seconds = [run["token_seconds"] for run in runs]
    rates = [batch * len(run) / sum(run) for run in token_seconds]
    cache = runs[0]["kv_cache_bytes"]
    return {
        **point,
        "prefill_tokens_per_second": batch * length / statistics.median(prefill_seconds),
        "decode_tokens_per_second": statistics.median(rates),
        "decode_seconds_per_token_p90": float(np.percentile(np.concatenate(token_seconds), 90)),
        **{
            name: statistics.median(run[name] for run in runs)
            for name in ("memory_peak_bytes", "memory_p90_bytes", "memory_start_bytes")
        },
        "kv_cache_bytes": cache,
        "kv_cache_bytes_per_token": cache / (batch * length),
        "attention": runs[0]["attention"],
        "runs": [{name: run[name] for name in _RUN_FIGURES} for run in runs],
    }


def add_original_ratios(points: Sequence[dict[str, Any]]) -> None:
    """Add to each hybrid's point its ratios to the original's figures, None if unknown."""
    originals = {p["length"]: p for p in points if p["model"] == "original"}
    for point in points:
        original = originals[point["length"]]
        if point is original:
            continue
        point["over_original"] = None
        if not (point["out_of_memory"] or original["out_of_memory"]):
            names = OverOriginal.model_fields
            point["over_original"] = {name: point[name] / original[name] for name in names}


def results_table(points: Sequence[dict[str, Any]]) -> Table:
    """A table with a row for each point and a group for each length."""
    groups = [
        Group([_row(point) for point in members])
        for _, members in groupby(points, key=lambda point: point["length"])
    ]
    return Table("", _HEADER, groups, text_columns=0)


def _row(point: dict[str, Any]) -> list[str]:
    row = [format_length(point["length"]), "original", ""]
    if point["model"] == "hybrid":
        row[1:] = [f"{_ratio(point):.3g}", _sizes(point)]
    if point["out_of_memory"]:
        return [*row, "out of memory"]
    speeds = ("prefill_tokens_per_second", "decode_tokens_per_second")
    sizes = ("memory_peak_bytes", "kv_cache_bytes", "kv_cache_bytes_per_token")
    row += [format_count(point[name]) for name in speeds]
    row.append(f"{1000 * point['decode_seconds_per_token_p90']:.1f}")
    return row + [format_bytes(point[name]) for name in sizes]


Point = dict[str, Any]


def _mask(point: Point) -> HeadMask:
    return HeadMask(point["windows"], point["sinks"])


def _ratio(point: Point) -> float:
    return _mask(point).swa_ratio


def _sizes(point: Point) -> str:
    return windows_text([Window(window.size) for window in _mask(point).menu])


def _window(point: Point) -> int:
    """The widest window of a hybrid."""
    return max((window.size for window in _mask(point).menu), default=0)


# Field of a point, title of its panel, and the value of one unit of the axis.
_PANELS = (
    ("prefill_tokens_per_second", "prefill, tokens/s", 1.0),
    ("decode_tokens_per_second", "decoding, tokens/s", 1.0),
    ("memory_p90_bytes", "memory, 90th percentile, GB", 1e9),
)
Quantity = Callable[[Point], float]
_LABELS: dict[Quantity, Callable[[Point], str]] = {
    _ratio: lambda point: f"ρ = {_ratio(point):.3g}",
    _window: lambda point: f"W = {_sizes(point)}",
}
_FIGURES: dict[str, tuple[Quantity, Quantity]] = {
    "figure_5_ratios": (_window, _ratio),
    "figure_6_windows": (_ratio, _window),
}


def figures(points: Sequence[Point]) -> dict[str, list[Picture]]:
    """Figures 5 and 6: panels for each window with a line for each ratio, and the reverse."""
    return {name: list(_panels(points, name, *fields)) for name, fields in _FIGURES.items()}


def draw_figures(drawn: dict[str, list[Picture]], folder: Path) -> None:
    for name, pictures in drawn.items():
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        save_panels(pictures, *paths, columns=len(_PANELS))


def _panels(
    points: Sequence[Point], name: str, panel: Quantity, line: Quantity
) -> Iterator[Picture]:
    for value in sorted({panel(p) for p in points if p["model"] == "hybrid"}):
        members = [p for p in points if p["model"] == "original" or panel(p) == value]
        labels = {"original": Style("original", dashed=True)}
        hybrids = sorted((p for p in members if p["model"] == "hybrid"), key=line)
        labels |= styles(map(_LABELS[line], hybrids))
        for field, title, unit in _PANELS:
            heading = f"{title}, {_LABELS[panel](hybrids[0])}"
            yield _panel(members, line, labels, field, unit, f"{name}-{field}-{value:g}", heading)


def _panel(
    points: Sequence[Point],
    line: Quantity,
    look: dict[str, Style],
    field: str,
    unit: float,
    name: str,
    heading: str,
) -> Picture:
    """One quantity over the length; out of memory is a cross at the bottom."""
    rows, missing = [], []
    for point in points:
        label = "original" if point["model"] == "original" else _LABELS[line](point)
        row = {"series": label, "x": point["length"]}
        point_text = f"{label}, {format_length(point['length'])}"
        if point["out_of_memory"]:
            missing.append(row | {"tip": f"{point_text}: out of memory"})
        else:
            y = point[field] / unit
            rows.append(row | {"y": y, "tip": f"{point_text}: {y:,.4g}"})
    lengths = sorted({point["length"] for point in points})
    x = Axis("prompt, tokens", "length", log=True, values=lengths)
    chart = curves(rows, x, Axis("", "count", zero=True), look, height=220)
    if missing:
        base = alt.Chart(values(missing)).encode(x="x:Q", color="series:N")
        heights = {series: 212 - 14 * number for number, series in enumerate(look)}
        for series in dict.fromkeys(row["series"] for row in missing):
            chart += base.transform_filter(f"datum.series == '{series}'").mark_text(
                text="✕ out of memory", y=heights[series], fontSize=10, align="right", dx=4
            )
    text = f"{heading}: " + "; ".join(row["tip"] for row in [*rows, *missing]) + "."
    return Picture(name, chart, text, heading)
