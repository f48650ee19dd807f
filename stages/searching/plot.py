"""search.png: the score of every evaluation and the best of its sub-problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bosch.loss import Anchors
from bosch.method.ledger import TracePoint

_TITLES = {
    "layer_importance": "Stage 1: layer importance",
    "head_selection": "Stage 3: head selection",
    "swaps": "Swaps",
}


def plot_trace(trace: Sequence[TracePoint], anchors: Anchors, path: Path) -> None:
    """Write one panel per stage of the search that evaluated anything."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = [name for name in _TITLES if any(point.stage == name for point in trace)]
    figure = Figure(figsize=(11, 3.6 * max(1, len(stages))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(stages)), 1, squeeze=False)[:, 0]
    if not stages:
        axes[0].plot([p.step for p in trace], [p.score for p in trace], "o")
    for axis, stage in zip(axes, stages, strict=False):
        _draw(axis, [point for point in trace if point.stage == stage])
        axis.set_title(_TITLES[stage], loc="left")
    for axis in axes:
        axis.axhline(anchors.all_full, color="0.6", linewidth=0.8, linestyle="--")
        axis.axhline(anchors.all_sliding, color="0.6", linewidth=0.8, linestyle=":")
        axis.set_ylim(-0.03, 1.08)
        axis.set_xlabel("evaluation")
        axis.set_ylabel("calibration score")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, points: list[TracePoint]) -> None:
    for number, (unit, group) in enumerate(groupby(points, key=lambda point: point.unit)):
        members = list(group)
        steps = [point.step for point in members]
        color = f"C{number % 10}"
        whole = [(p.step, p.score) for p in members if not p.is_bound]
        if whole:
            axis.plot(*zip(*whole, strict=True), ".", color=color, alpha=0.45, markersize=4)
        axis.plot(steps, [p.best_score for p in members], color=color, drawstyle="steps-post")
        axis.annotate(unit, (steps[0], 1.04), fontsize=7, color=color)
