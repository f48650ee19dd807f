"""Plots of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import LogLocator, NullFormatter

from bosch.analysis.intervals import Estimate
from bosch.analysis.optimality import Standing
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation
from bosch.search.methods import METHODS
from pipeline.commands.plots import color, error_bars, legend, marker, panels

_LEAST_NATS = 1e-4


def landscapes(
    curves: Mapping[float, tuple[Mapping[HeadMask, Evaluation], Mapping[str, list[Standing]]]],
) -> Any:
    """Log-likelihood of all masks in falling order, and the methods' masks on that curve."""
    figure, axes = panels(len(curves), height=4.2)
    for axis, (ratio, (landscape, standings)) in zip(axes, curves.items(), strict=True):
        values = np.sort([_missing(e.log_likelihood) for e in landscape.values()])
        axis.plot(np.arange(1, len(values) + 1), values, color="0.75", linewidth=3, zorder=1)
        for number, (method, own) in enumerate(standings.items()):
            axis.plot(
                [s.log_likelihood_rank for s in own],
                [_missing(s.log_likelihood) for s in own],
                marker(number),
                color=color(number),
                markersize=7,
                alpha=0.75,
                label=method,
            )
        axis.set(
            xscale="log",
            title=f"ρ = {ratio:g}, {len(values)} masks",
            xlabel="rank by log-likelihood",
            ylabel="− log-likelihood (nats)",
            yscale="log",
        )
        axis.invert_yaxis()
    legend(figure, axes[0], "lower center", columns=2 * len(curves))
    return figure


def cost_curves(points: Sequence[Any], ratios: Sequence[float]) -> Any:
    """Held-out score and log-likelihood against full-forward equivalents, a panel per ratio."""
    figure, axes = panels(len(ratios), rows=2)
    methods = list(dict.fromkeys(point.method for point in points))
    for column, ratio in enumerate(ratios):
        for number, method in enumerate(methods):
            own = [p for p in points if p.method == method and p.ratio == ratio]
            scores = [_ends(p.score) for p in own]
            missing = [
                (_missing(mean), _missing(high), _missing(low))
                for mean, low, high in (_ends(p.likelihood) for p in own)
            ]
            for row, intervals in enumerate((scores, missing)):
                axes[row * len(ratios) + column].errorbar(
                    [p.passes for p in own],
                    [mean for mean, _, _ in intervals],
                    yerr=error_bars(intervals),
                    fmt=marker(number) + "-" * METHODS[method].searches,
                    color=color(number),
                    markersize=5,
                    linewidth=1.2,
                    elinewidth=0.6,
                    alpha=0.85,
                    label=method,
                )
        axes[column].set(xscale="log", ylim=(-0.03, 1.03), title=f"ρ = {ratio:g}")
        below = axes[len(ratios) + column]
        below.set(xscale="log", yscale="log", xlabel="full passes")
        below.invert_yaxis()
        for axis in (axes[column], below):
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("held-out score")
    axes[len(ratios)].set_ylabel("− held-out log-likelihood (nats)")
    legend(figure, axes[0], "lower center", columns=2 * len(ratios))
    return figure


def stability_curves(ranks: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, Any]]) -> Any:
    """Left: Spearman's rho against the probe budget. Right: score against calibration size."""
    figure, axes = panels(2, width=5.5)
    by_ratio = sorted({r["swa_ratio"] for r in ranks})
    lines = sorted(ranks, key=lambda r: (r["measure"], r["swa_ratio"], r["same_calibration_set"]))
    grouped = groupby(
        lines, key=lambda r: (r["measure"], r["swa_ratio"], r["same_calibration_set"])
    )
    for (measure, ratio, same), group in grouped:
        ordered = [r for r in group if r["mean"] is not None]
        if same or not ordered:
            continue
        axes[0].plot(
            [r["budget_per_layer"] for r in ordered],
            [r["mean"] for r in ordered],
            "o-" if measure == "score" else "s--",
            color=f"C{by_ratio.index(ratio)}",
            label=f"ρ = {ratio:g}, {measure.replace('_', '-')}",
        )
    axes[0].set(xlabel="evaluations per layer", ylabel="mean Spearman ρ between seeds")
    axes[0].set_ylim(-1.05, 1.05)
    key = lambda r: (r["method"], r["swa_ratio"])  # noqa: E731
    methods = list(dict.fromkeys(r["method"] for r in sizes))
    for (method, ratio), group in groupby(sorted(sizes, key=key), key=key):
        own = list(group)
        axes[1].plot(
            [r["examples"] for r in own],
            [r["held_out_score"]["mean"] for r in own],
            marker(methods.index(method)) + "-",
            color=f"C{by_ratio.index(ratio) if ratio in by_ratio else 0}",
            label=f"{method}, ρ = {ratio:g}",
        )
    axes[1].set(xlabel="calibration examples", ylabel="held-out score", ylim=(-0.03, 1.03))
    for axis in axes:
        axis.legend(fontsize=6, frameon=False)
    return figure


def jaccard_maps(distances: Mapping[float, npt.NDArray[np.float64]], methods: Sequence[str]) -> Any:
    """A heat map of Jaccard distances per ratio, two in a row."""
    side, columns = 1.2 + 0.42 * len(methods), min(2, len(distances))
    figure, axes = panels(columns, -(-len(distances) // columns), side, side + 0.4)
    for axis in axes[len(distances) :]:
        axis.set_axis_off()
    for axis, (ratio, matrix) in zip(axes, distances.items(), strict=False):
        axis.imshow(matrix, vmin=0.0, vmax=1.0, cmap="magma")
        axis.set_title(f"ρ = {ratio:g}")
        axis.set_xticks(range(len(methods)), methods, rotation=60, ha="right", fontsize=8)
        axis.set_yticks(range(len(methods)), methods, fontsize=8)
        for (row, column), value in np.ndenumerate(matrix):
            color = "white" if value < 0.6 else "black"
            axis.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color
            )
    return figure


def _ends(estimate: Estimate) -> tuple[float, float, float]:
    """Mean and ends of its interval; of too few values only the mean is drawn."""
    mean, low, high = estimate
    return mean, mean if low is None else low, mean if high is None else high


def _missing(log_likelihood: float) -> float:
    """Distance to 0, for a log axis: log-likelihoods span four powers of ten."""
    return max(_LEAST_NATS, -log_likelihood)
