"""The trace of a search as a chart, for its own files and for the report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt

from bosch.mask_files import Front
from bosch.search.trace import TracePoint, subproblem_key
from stages.formats import format_bytes
from stages.pages.charts import (
    Axis,
    Picture,
    Style,
    colour,
    curves,
    save,
    shape,
    styles,
    values,
)
from stages.search.stage import FRONT_PICTURE, TRACES, SearchSummary

# By phase: its name in the legend, and the style of its points.
_PHASES = {
    "anchors": ("anchors", Style("ink")),
    "layer_importance": ("Algorithm 1, layer importance", Style("seventh")),
    "head_selection": ("Algorithm 3, head selection", Style("untrained", "square")),
    "start": ("masks that gradients propose", Style("seventh")),
    "swaps": ("swaps that were evaluated in full", Style("untrained", "square")),
    "final": ("last evaluation", Style("ink")),
}
_FINAL, _BEST = "final mask", "best so far"
_AXES = {
    "score": Axis("Score S(z), exact match", "share", domain=(-0.03, 1.03)),
    "log_likelihood": Axis("Log-likelihood (nats)"),
}


def write_traces(summary: SearchSummary, mask: str, folder: Path) -> None:
    """Write the traces as SVG files, if anything was evaluated; `mask` is the final mask's key."""
    for quantity, file in TRACES.items():
        picture = trace(summary, mask, quantity)
        if picture is not None:
            save(picture.chart.properties(width=900), folder / file, picture.description)


def write_front(front: Front, folder: Path) -> None:
    """Write the picture of a front as an SVG file."""
    picture = front_picture(front)
    save(picture.chart.properties(width=900), folder / FRONT_PICTURE, picture.description)


def trace(summary: SearchSummary, mask: str, quantity: str) -> Picture | None:
    """Score or log-likelihood of all evaluations by their phase; None without any."""
    points = summary.trace
    if not points:
        return None
    labels = {point.phase: point.phase for point in points}
    labels |= {phase: label for phase, (label, _) in _PHASES.items()}
    rows = [_row(point, quantity, labels[point.phase]) for point in points]
    final = next((point for point in reversed(points) if point.mask == mask), None)
    rows += [] if final is None else [_row(final, quantity, _FINAL)]
    best = list(_best(points)) if quantity == "score" else []
    fixed = dict(_PHASES.values()) | {_FINAL: Style("fifth", "diamond"), _BEST: Style("ink")}
    look = styles((row["series"] for row in [*rows, *best]), fixed)
    ends = points[0].step - 0.5, points[-1].step + 0.5
    x = Axis("Evaluation", "whole", domain=ends).of(alt.X, "x")
    y = _AXES[quantity].of(alt.Y, "y")
    dots = alt.Chart(values(rows)).mark_point(filled=True, size=40, opacity=0.85)
    dots = dots.encode(x=x, y=y, color=colour(look), shape=shape(look))
    stairs = alt.Chart(values(best)).mark_line(interpolate="step-after", strokeWidth=1.5)
    stairs = stairs.encode(x=x, y=y, color=colour(look), detail="run:N")
    chart = alt.layer(dots, *([stairs] if best else [])).properties(height=300)
    name = "trace" if quantity == "score" else "trace-ll"
    numbers = [getattr(point, quantity) for point in points]
    text = f"{len(points)} evaluations, from {min(numbers):.4g} to {max(numbers):.4g}."
    heading = "Score" if quantity == "score" else "Log-likelihood of the answers"
    return Picture(name, chart, text, f"{heading} over evaluations")


def front_picture(front: Front, chosen: int | None = None) -> Picture:
    """Score of each point over its KV cache, held-out if measured, with one-sided 95 % limits."""
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(front.points):
        held_out = point.held_out
        score = point.score if held_out is None else held_out.score
        series = "front"
        if index == len(front.points) - 1 and not point.mask.num_sliding:
            series = "original"
        if index == chosen:
            series = "chosen"
        limits = {} if held_out is None else {"low": held_out.low, "high": held_out.high}
        share = point.kv_slots / front.points[-1].kv_slots
        tip = (
            f"{format_bytes(point.bytes or 0)}, {share:.1%} of the original's KV slots, "
            f"{int(point.mask.is_full.sum())} full KV heads: score {score:.4g}"
        )
        row = {"series": series, "x": point.bytes, "y": score, "tip": tip, "number": index + 1}
        rows.append(row | limits)
    look = {
        "front": Style("hybrid"), "chosen": Style("fifth", "diamond"),
        "original": Style("original", "square"),
    }  # fmt: skip
    ends = [math.log2(row["x"]) for row in (rows[0], rows[-1])]
    powers = [2.0**power for power in range(math.ceil(ends[0]), math.floor(ends[1]) + 1)]
    x = Axis(f"KV cache at {front.context:,} tokens (bytes, log)", "bytes", log=True, values=powers)
    examples = "held-out examples" if "low" in rows[0] else "calibration examples"
    y = Axis(f"Score on {examples}, exact match", "share", domain=(-0.03, 1.03))
    line = alt.Chart(values(rows)).mark_line(color="var(--hybrid)", opacity=0.5)
    chart = curves(rows, x, y, look, has_lines=False)
    numbers = alt.Chart(values(rows)).mark_text(dx=9, align="left")
    for mark in (line, numbers.encode(text="number:N")):
        chart += mark.encode(x=x.of(alt.X, "x"), y=y.of(alt.Y, "y"))
    text = "; ".join(f"{row['number']}: {row['tip']}" for row in rows)
    return Picture("front", chart, f"{text}.", "Score over the KV cache")


def _row(point: TracePoint, quantity: str, series: str) -> dict[str, Any]:
    return {"x": point.step, "y": getattr(point, quantity), "series": series}


def _best(points: list[TracePoint]) -> Iterator[dict[str, Any]]:
    """Best score so far, for each sub-problem."""
    for run, run_points in groupby(points, key=lambda p: subproblem_key(p.phase, p.subproblem)):
        for point in run_points:
            row = {"x": point.step, "y": point.best_score, "series": _BEST}
            yield row | {"run": str(run)}
