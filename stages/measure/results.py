"""efficiency.json, its table and its figure from the runs of each point.

With several ratios the figure is BOSCH's Figure 5, with several windows Figure 6 (C.4): throughput
and memory over the length of the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from bosch.masks import HeadMask
from bosch.window import windows_text
from stages.formats import format_bytes, format_count, format_length
from stages.measure.measured_model import label
from stages.measure.stage import OverOriginal
from stages.pages.charts import Axis, Style, curves, save, styles
from stages.pages.tables import Table

Point = dict[str, Any]
_HEADER = (
    "length", "ρ", "W", "prefill\ntokens/s", "decode\ntokens/s", "token\np90, ms",
    "peak\nmemory", "KV\ncache", "per\ntoken",
)  # fmt: skip
_RUN_FIGURES = ("prefill_seconds", "token_seconds", "memory_peak_bytes", "memory_p90_bytes")
# Field of a point, title of its panel, and the value of one unit of the axis.
_PANELS = (
    ("prefill_tokens_per_second", "prefill, tokens/s", 1.0),
    ("decode_tokens_per_second", "decoding, tokens/s", 1.0),
    ("memory_p90_bytes", "memory, 90th percentile, GB", 1e9),
)
FIGURE = "efficiency"


def point_of(mask: HeadMask, length: int, batch: int, runs: Sequence[dict[str, Any]]) -> Point:
    """One point: medians over its runs, and the figures of each run.

    Tokens per second count all rows of the batch. `kv_cache_bytes_per_token` is the cache's bytes
    divided by the tokens of the prompt.
    """
    kind = "hybrid" if mask.num_sliding else "original"
    reason = next((run["out_of_memory"] for run in runs if "out_of_memory" in run), None)
    point = {"model": kind, **mask.content, "length": length, "out_of_memory": reason is not None}
    if reason is not None:
        return {**point, "out_of_memory_reason": reason}
    prefill_seconds = statistics.median(run["prefill_seconds"] for run in runs)
    token_seconds = [run["token_seconds"] for run in runs]
    cache = runs[0]["kv_cache_bytes"]
    return {
        **point,
        "prefill_tokens_per_second": batch * length / prefill_seconds,
        "decode_tokens_per_second": statistics.median(
            batch * len(run) / sum(run) for run in token_seconds
        ),
        "decode_seconds_per_token_p90": float(np.percentile(np.concatenate(token_seconds), 90)),
        **{
            name: statistics.median(run[name] for run in runs)
            for name in ("memory_peak_bytes", "memory_p90_bytes")
        },
        "kv_cache_bytes": cache,
        "kv_cache_bytes_per_token": cache / (batch * length),
        "attention": runs[0]["attention"],
        "runs": [{name: run[name] for name in _RUN_FIGURES} for run in runs],
    }


def add_original_ratios(points: Sequence[Point]) -> None:
    """Add to each hybrid's point its ratios to the original's figures, None if unknown."""
    originals = {p["length"]: p for p in points if p["model"] == "original"}
    for point in (point for point in points if point["model"] == "hybrid"):
        original, names = originals[point["length"]], OverOriginal.model_fields
        failed = point["out_of_memory"] or original["out_of_memory"]
        ratios = None if failed else {name: point[name] / original[name] for name in names}
        point["over_original"] = ratios


def results_table(points: Sequence[Point]) -> Table:
    """A table with a row for each point and a group for each length."""
    groups = [
        [_row(point) for point in members]
        for _, members in groupby(points, key=lambda point: point["length"])
    ]
    return Table("", _HEADER, groups, text_columns=0)


def _mask(point: Point) -> HeadMask:
    return HeadMask(point["windows"], point["sinks"])


def _row(point: Point) -> list[str]:
    row, mask = [format_length(point["length"]), "original", ""], _mask(point)
    if mask.num_sliding:
        row[1:] = [f"{mask.swa_ratio:.3g}", windows_text(mask.menu)]
    if point["out_of_memory"]:
        return [*row, "out of memory"]
    speeds = ("prefill_tokens_per_second", "decode_tokens_per_second")
    sizes = ("memory_peak_bytes", "kv_cache_bytes", "kv_cache_bytes_per_token")
    row += [format_count(point[name]) for name in speeds]
    row.append(f"{1000 * point['decode_seconds_per_token_p90']:.1f}")
    return row + [format_bytes(point[name]) for name in sizes]


def draw_figure(points: Sequence[Point], folder: Path) -> str:
    """Write the figure as PNG and SVG: a line for each model; returns its description.

    A length that ran out of memory has no point.
    """
    look = styles((label(_mask(p)) for p in points), {"original": Style("original", dashed=True)})
    lengths = sorted({point["length"] for point in points})
    panels, texts = [], []
    for field, title, unit in _PANELS:
        rows = [
            {"series": label(_mask(p)), "x": p["length"], "y": p[field] / unit}
            for p in points if not p["out_of_memory"]
        ]  # fmt: skip
        if rows:
            x = Axis("prompt, tokens", "length", log=True, values=lengths)
            chart = curves(rows, x, Axis("", "count", zero=True), look, height=220)
            panels.append(chart.properties(width=320, title=title))
            values = (f"{row['series']}, {row['x']:,}: {row['y']:,.4g}" for row in rows)
            texts.append(f"{title}: {'; '.join(values)}")
    text = ". ".join(texts)
    for kind in ("png", "svg") if panels else ():
        chart = alt.hconcat(*panels).resolve_scale(color="shared", shape="shared")
        save(chart.resolve_scale(strokeDash="shared"), folder / f"{FIGURE}.{kind}", text)
    return text
