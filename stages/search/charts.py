"""The trace of a search as a chart, for its own files and for the report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import altair as alt

from bosch.front import Front
from bosch.search.trace import TracePoint, subproblem_key
from stages.formats import format_bytes
from stages.pages.charts import (
    Axis,
    Picture,
    Style,
    colour,
    curves,
    layers,
    picker,
    save,
    shape,
    styles,
    values,
)
from stages.search.stage import FRONT_PICTURE, TRACES, SearchSummary

# By phase: its name above the picture and in the legend, and the style of its points.
PHASES = {
    "anchors": ("Anchors", "anchors", Style("ink")),
    "layer_importance": ("Algorithm 1", "Algorithm 1, layer importance", Style("seventh")),
    "head_selection": ("Algorithm 3", "Algorithm 3, head selection", Style("untrained", "square")),
    "repair": ("Repair", "repair, back to the budget", Style("ink")),
    "ablation": ("Ablation", "one head or layer at a time", Style("seventh")),
    "start": ("Start", "masks that gradients propose", Style("seventh")),
    "swaps": ("Swaps", "swaps that were evaluated in full", Style("untrained", "square")),
    "final": ("Final", "last evaluation", Style("ink")),
}
_FINAL, _BEST = "final mask", "best so far in the sub-problem"
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
    """Score or log-likelihood of all evaluations, phases shaded; None without any."""
    points = summary.trace
    if not points:
        return None
    rows = [_row(point, quantity, _names(point.phase)[1]) for point in points]
    final = next((point for point in reversed(points) if point.mask == mask), None)
    rows += [] if final is None else [_row(final, quantity, _FINAL)]
    phase_styles = {label: style for _, label, style in PHASES.values()}
    labels = (_names(point.phase)[1] for point in points)
    look = styles([*phase_styles, *labels], phase_styles)
    look |= {_FINAL: Style("fifth", "diamond"), _BEST: Style("ink")}
    best = list(_best(points)) if quantity == "score" else []
    present = {row["series"] for row in [*rows, *best]}
    look = {label: style for label, style in look.items() if label in present}
    picked = picker()
    # Zooming is bound to the scales of the first layer, so the axes belong there.
    ends = points[0].step - 0.5, points[-1].step + 0.5
    x = Axis("Evaluation", "whole", domain=ends).of(alt.X, "x")
    y = _AXES[quantity].of(alt.Y, "y")
    dots = alt.Chart(values(rows)).mark_point(filled=True, opacity=0.8).encode(
        x=x, y=y, color=colour(look), shape=shape(look), tooltip="tip:N",
        size=alt.condition(f"datum.series == '{_FINAL}'", alt.value(130), alt.value(26)),
        opacity=alt.condition(picked, alt.value(0.85), alt.value(0.05)),
    )  # fmt: skip
    stairs = alt.Chart(values(best)).mark_line(interpolate="step-after", strokeWidth=1.5)
    stairs = stairs.encode(x=x, y=y, color=colour(look), detail="run:N")
    chart = layers(dots, *_bands(points), *([stairs] if best else []), height=300, picked=picked)
    name = "trace" if quantity == "score" else "trace-ll"
    numbers = [getattr(point, quantity) for point in points]
    text = f"{len(points)} evaluations, from {min(numbers):.4g} to {max(numbers):.4g}."
    heading = "Score" if quantity == "score" else "Log-likelihood of the answers"
    return Picture(name, chart, text, f"{heading} over evaluations")


def front_picture(front: Front) -> Picture:
    """Score of each point over its KV cache, held-out if measured, with one-sided 95 % limits."""
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(front.points):
        is_held_out = point.held_out_score is not None
        score = point.held_out_score if is_held_out else point.score
        series = "front"
        if index == len(front.points) - 1 and not front.mask(index).num_sliding:
            series = "original"
        if index == front.chosen:
            series = "chosen"
        limits = {"low": point.held_out_low, "high": point.held_out_high} if is_held_out else {}
        share = point.kv_slots / front.points[-1].kv_slots
        tip = (
            f"{format_bytes(point.bytes or 0)}, {share:.1%} of the original's KV slots, "
            f"{point.full_kv_heads} full KV heads: score {score:.4g}"
        )
        rows.append({"series": series, "x": point.bytes, "y": score, "tip": tip, **limits})
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
    chart += line.encode(x=x.of(alt.X, "x"), y=y.of(alt.Y, "y"))
    text = "; ".join(row["tip"] for row in rows)
    return Picture("front", chart, f"{text}.", "Score over the KV cache")


def _row(point: TracePoint, quantity: str, series: str) -> dict[str, Any]:
    value = getattr(point, quantity)
    tip = f"{series}, evaluation {point.step:,}, {point.subproblem}: {value:.4g}"
    return {"x": point.step, "y": value, "series": series, "tip": tip}


def _best(points: list[TracePoint]) -> Iterator[dict[str, Any]]:
    """Best score so far, for each sub-problem."""
    for run, run_points in groupby(points, key=lambda p: subproblem_key(p.phase, p.subproblem)):
        for point in run_points:
            row = {"x": point.step, "y": point.best_score, "series": _BEST}
            yield row | {"run": str(run)}


def _bands(points: list[TracePoint]) -> list[alt.Chart]:
    """Layers that shade every other phase, name each, and mark where a sub-problem begins."""
    bands, starts = [], []
    for index, (phase, phase_points) in enumerate(groupby(points, key=lambda point: point.phase)):
        steps = [(point.step, point.subproblem) for point in phase_points]
        first, last = steps[0][0] - 0.5, steps[-1][0] + 0.5
        name = _names(phase)[0] if last - first > 0.06 * len(points) else ""
        bands.append({"x": first, "x2": last, "name": name, "shade": index % 2})
        starts += [{"x": step - 0.5} for (_, old), (step, new) in pairwise(steps) if old != new]
    base = alt.Chart(values(bands))
    middle = base.transform_calculate(x="(datum.x + datum.x2) / 2")
    return [
        base.transform_filter("datum.shade")
        .mark_rect(color="var(--soft)", opacity=0.1)
        .encode(x="x:Q", x2="x2:Q"),
        alt.Chart(values(starts)).mark_rule(strokeDash=[2, 3], color="var(--rule)").encode(x="x:Q"),
        middle.mark_text(y=-8, fontWeight="bold", clip=False).encode(x="x:Q", text="name:N"),
    ]


def _names(phase: str) -> tuple[str, str]:
    name, label, _ = PHASES.get(phase, (phase, phase, None))
    return name, label
