"""compare.png: scores of all methods, one panel for each ratio."""

from __future__ import annotations

import statistics
from typing import Any

from pipeline.commands import plots
from pipeline.commands.compare.comparison import Comparison, Models, label_of

_COLORS: dict[Models, str] = {"untrained": "#2a6f97", "trained": "#d1603d"}


def score_plot(comparison: Comparison) -> Any:
    """The figure for the first suite."""
    suite, original = next(iter(comparison.originals.items()))
    ratios, methods = comparison.ratios, comparison.methods
    figure, axes = plots.panels(
        len(ratios), width=2.4 + 2.2 / len(ratios), height=1.5 + 0.3 * len(methods),
        sharey=True, sharex=True,
    )  # fmt: skip
    for axis, ratio in zip(axes, ratios, strict=True):
        axis.axvline(
            original.average, color=plots.GREY, linestyle="--", linewidth=1, label="original model"
        )
        _dots(axis, comparison, ratio, "untrained", suite)
        if comparison.with_training:
            _dots(axis, comparison, ratio, "trained", suite)
        axis.set_title(f"ρ = {ratio:g}", loc="left", fontsize=10)
        axis.set_xlim(-3, 103)
        axis.set_xlabel(f"{suite} average")
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="y", length=0)
        plots.horizontal_grid(axis)
    axes[0].set_yticks(range(len(methods)), [label_of(method) for method in methods])
    axes[0].invert_yaxis()
    plots.legend(figure, axes[0], "upper right", columns=3)
    return figure


def _dots(axis: Any, comparison: Comparison, ratio: float, models: Models, suite: str) -> None:
    """The mean of each method, with its range over seeds."""
    places, means = [], []
    for place, method in enumerate(comparison.methods):
        values = comparison.values(method, ratio, models, suite)
        if values:
            places.append(place)
            means.append(statistics.fmean(values))
            axis.plot(
                [min(values), max(values)], [place, place], color=_COLORS[models], linewidth=1.5
            )
    axis.plot(means, places, "o", color=_COLORS[models], markersize=5, label=models)
