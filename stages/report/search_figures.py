"""The report's pictures of the search: head mask, layer importance, evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from bosch.search.evaluator import search_of
from stages.formats import format_share
from stages.report.charts import Canvas, Plot, left_margin, nice_ticks, svg_file, whole_ticks
from stages.report.figures import WIDE, bars, extent, finite
from stages.report.results import Search
from stages.search.stage import TRACES, TracePoint

LEFT, RIGHT = 52, 14
PHASE_NAMES = {
    "anchors": "Anchors",
    "layer_importance": "Algorithm 1: layer importance",
    "head_selection": "Algorithm 3: head selection",
    "repair": "Repair: back to the budget",
    "ablation": "Ablation: one at a time",
    "start": "Start: gradients",
    "swaps": "Swaps",
    "final": "Final mask",
}


def head_mask(search: Search, width: float, name: str) -> str:
    """Layers (x) by KV heads (y), dark where the head is full and light where it slides."""
    layers, heads = search.mask.num_layers, search.mask.num_key_value_heads
    slot = (width - LEFT - RIGHT) / layers
    row = min(28.0, max(14.0, slot))
    gap = 1 if slot < 12 else 3
    top = 26
    canvas = Canvas(width, top + heads * row + 46)
    stride = label_stride(slot, layers)
    for layer, sliding in enumerate(search.mask.swa_kv_heads):
        x = LEFT + layer * slot
        for head in range(heads):
            kind = "sliding" if head in sliding else "full"
            tip = f"layer {layer}, KV head {head}: {kind}"
            y = top + head * row
            canvas.rect(x + gap / 2, y + gap / 2, slot - gap, row - gap, f"cell {kind}", tip, 2)
        if layer % stride == 0:
            canvas.text(x + slot / 2, top + heads * row + 16, str(layer), anchor="middle")
            canvas.text(x + slot / 2, top - 8, str(len(sliding)), "tick strong", "middle")
    for head in range(heads):
        canvas.text(LEFT - 8, top + (head + 0.5) * row + 4, str(head), anchor="end")
    canvas.text(LEFT - 8, top - 8, "sliding", "tick", "end")
    middle = top + heads * row / 2
    canvas.text(13, middle, "KV head", "label", "middle", -90)
    canvas.text((LEFT + width - RIGHT) / 2, top + heads * row + 37, "Layer", "label", "middle")
    by_layer = enumerate(search.mask.swa_kv_heads)
    counts = ", ".join(f"{layer}: {len(sliding)}" for layer, sliding in by_layer)
    return canvas.svg(
        name,
        "Head mask, layers by KV heads",
        f"{search.sliding} of {search.total} KV heads slide. Sliding heads by layer: {counts}.",
    )


def label_stride(slot: float, layers: int) -> int:
    """Every how many layers a label fits when a layer is `slot` pixels wide."""
    return next(step for step in (1, 2, 4, 8, 16, layers) if slot * step >= 18 or step >= layers)


def layer_panel(
    search: Search, field: str, label: str, css: str, unit_range: bool, width: float, name: str
) -> str:
    """One quantity of Algorithm 1 or 2 by layer, on the same x axis as the head mask."""
    rows = sorted(search.summary.layer_importance, key=lambda row: row.layer)
    values: list[tuple[float, float | None]] = [(r.layer + 0.5, getattr(r, field)) for r in rows]
    drawn = [(x, y) for x, y in values if y is not None]
    low, high = extent([0.0, *finite([y for _, y in drawn])])
    y_range = (0.0, 1.0) if unit_range else (min(low, 0.0), max(high, 0.0))
    percent = field != "weight" and max(map(abs, y_range)) >= 0.02
    fmt = format_share if percent else _four
    ticks = nice_ticks(*y_range, 3)
    left = left_margin(map(fmt, ticks))
    plot = Plot.make(width, 150, (0, search.mask.num_layers), y_range, left=left, right=RIGHT)
    plot.y_axis(ticks, label, fmt)
    slot = (plot.x.end - plot.x.start) / search.mask.num_layers
    stride = label_stride(slot, search.mask.num_layers)
    for layer in range(0, search.mask.num_layers, stride):
        plot.canvas.text(plot.x(layer + 0.5), plot.y.start + 17, str(layer), anchor="middle")
    middle = (plot.x.start + plot.x.end) / 2
    plot.canvas.text(middle, plot.y.start + 37, "Layer", "label", "middle")
    tips = [f"layer {int(x)}: {label.lower()} {y:.4g}" for x, y in drawn]
    bars(plot, drawn, slot, f"bar {css}", tips)
    plot.canvas.line([(plot.x.start, plot.y(0.0)), (plot.x.end, plot.y(0.0))], "axis")
    spoken = ", ".join(f"{int(x)}: {y:.3g}" for x, y in drawn)
    return plot.canvas.svg(name, f"{label} by layer", f"{spoken}.")


def trace_files(search: Search) -> dict[str, str]:
    """The search's traces as SVG files by name; none where nothing was evaluated."""
    return {
        file: svg_file(search_trace(search, quantity, WIDE, "trace"))
        for quantity, file in TRACES.items()
        if any(not point.is_bound for point in search.summary.trace)
    }


def search_trace(search: Search, quantity: str, width: float, name: str) -> str:
    """Score or log-likelihood of every evaluation, banded by phase, with the best so far.

    An evaluation that ended early has bounds instead of values and no dot.
    """
    trace = [point for point in search.summary.trace if finite([getattr(point, quantity)])]
    whole = [point for point in trace if not point.is_bound]
    is_score = quantity == "score"
    values = [getattr(point, quantity) for point in whole]
    steps = [point.step for point in trace]
    y_range = (-0.03, 1.03) if is_score else extent(values)
    x_range = (min(steps) - 0.5, max(steps) + 0.5)
    ticks = [0, 0.25, 0.5, 0.75, 1] if is_score else nice_ticks(*y_range)
    fmt = format_share if is_score else _four
    left = left_margin(map(fmt, ticks))
    plot = Plot.make(width, 320, x_range, y_range, left=left, right=RIGHT, top=34)
    _bands(plot, trace)
    label = "Score S(z), exact match" if is_score else "Log-likelihood (nats)"
    plot.y_axis(ticks, label, fmt)
    count = 8 if width > 400 else 4
    plot.x_axis(whole_ticks(*x_range, count), "Evaluation", lambda value: f"{value:,.0f}")
    for phase in PHASE_NAMES:
        own = [(point.step, getattr(point, quantity)) for point in whole if point.phase == phase]
        plot.canvas.dots(plot.points(own), f"dots {phase}")
    if is_score:
        for _, points in groupby(trace, key=lambda p: search_of(p.phase, p.subproblem)):
            plot.canvas.line(_staircase(plot, list(points)), "line best")
    final = final_point(search)
    if final is not None:
        value = getattr(final, quantity)
        x, y = plot.points([(final.step, value)])[0]
        tip = f"final mask, evaluation {final.step}: {fmt(value)}"
        plot.canvas.diamond(x, y, 5, "dot final", tip)
    return plot.canvas.svg(
        name,
        f"{'Score' if is_score else 'Log-likelihood'} over evaluations",
        f"{len(trace)} evaluations, from {min(values):.4g} to {max(values):.4g}.",
    )


def final_point(search: Search) -> TracePoint | None:
    """The evaluation of the mask that the search returned, which need not be its last."""
    key = search.mask.mask.key
    whole = [point for point in search.summary.trace if not point.is_bound]
    return next((point for point in reversed(whole) if point.mask == key), None)


def _bands(plot: Plot, trace: Sequence[TracePoint]) -> None:
    """Shade every other phase of the search, name it on top, mark where sub-problems begin."""
    canvas = plot.canvas
    for index, (phase, rows) in enumerate(groupby(trace, key=lambda point: point.phase)):
        steps = [(point.step, point.subproblem) for point in rows]
        start, end = plot.x(steps[0][0] - 0.5), plot.x(steps[-1][0] + 0.5)
        css = "band even" if index % 2 else "band odd"
        canvas.rect(start, plot.y.end, end - start, plot.y.start - plot.y.end, css)
        label = PHASE_NAMES.get(phase, phase)
        label = label if end - start > 6.4 * len(label) else label.split(":")[0]
        if end - start > 6.4 * len(label):
            canvas.text((start + end) / 2, plot.y.end - 10, label, "tick strong", "middle")
        for (_, before), (step, subproblem) in pairwise(steps):
            if subproblem != before:
                at = plot.x(step - 0.5)
                canvas.line([(at, plot.y.start), (at, plot.y.end)], "subproblem")


def _staircase(plot: Plot, rows: Sequence[TracePoint]) -> list[tuple[float, float]]:
    """The best score inside one sub-problem, as a staircase in pixels."""
    stairs: list[tuple[float, float]] = []
    for row in rows:
        if row.best_score is None or not finite([row.best_score]):
            continue
        x, y = plot.x(row.step), plot.y(row.best_score)
        if stairs:
            stairs.append((x, stairs[-1][1]))
        stairs.append((x, y))
    return stairs


def _four(value: float) -> str:
    return f"{value:.4g}"
