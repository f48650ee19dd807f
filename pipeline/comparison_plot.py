"""compare.png: scores of all methods, one panel for each ratio."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from pipeline.comparison import Comparison, Models, label_of

_UNTRAINED, _TRAINED, _ORIGINAL = "#2a6f97", "#d1603d", "0.45"


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture of the first suite; replaces an older one in one step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    suite = next(iter(comparison.originals))
    ratios, methods = comparison.ratios, comparison.methods
    size = (2.2 + 2.4 * len(ratios), 1.5 + 0.3 * len(methods))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(ratios), sharey=True, sharex=True, squeeze=False)[0]
    for axis, ratio in zip(axes, ratios, strict=True):
        axis.axvline(
            comparison.originals[suite].average, color=_ORIGINAL, linestyle="--", linewidth=1,
            label="original model",
        )  # fmt: skip
        _dots(axis, comparison, ratio, "untrained", suite, _UNTRAINED)
        if comparison.with_training:
            _dots(axis, comparison, ratio, "trained", suite, _TRAINED)
        axis.set_title(f"ρ = {ratio:g}", loc="left", fontsize=10)
        axis.set_xlim(-3, 103)
        axis.set_xlabel(f"{suite} average")
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(methods)), [label_of(method) for method in methods])
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    partial = path.with_name(f".{path.name}.partial.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(partial, dpi=130)
    os.replace(partial, path)


def _dots(
    axis: Any, comparison: Comparison, ratio: float, models: Models, suite: str, color: str
) -> None:
    """The mean of each method, with its range over seeds."""
    places, means = [], []
    for place, method in enumerate(comparison.methods):
        values = comparison.values(method, ratio, models, suite)
        if values:
            places.append(place)
            means.append(statistics.fmean(values))
            axis.plot([min(values), max(values)], [place, place], color=color, linewidth=1.5)
    axis.plot(means, places, "o", color=color, markersize=5, label=models)
