"""Charts of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from bosch.analysis.optimality import Standing
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation
from pipeline.commands.study.runs import Measured
from stages.pages.charts import Axis, Picture, curves, styles, values

_MIN_NATS = 1e-4
_SCORE = Axis("held-out score", domain=(-0.03, 1.03))


def landscapes(
    by_ratio: Mapping[float, tuple[Mapping[HeadMask, Evaluation], Mapping[str, list[Standing]]]],
) -> list[Picture]:
    """Log-likelihood of all masks in descending order, with the methods' masks on that curve."""
    pictures = []
    for ratio, (landscape, standings) in by_ratio.items():
        losses = [_positive(evaluation.log_likelihood) for evaluation in landscape.values()]
        nats = np.sort(losses).tolist()
        all_masks = [{"x": rank, "y": value} for rank, value in enumerate(nats, start=1)]
        rows = [
            {"series": method, "x": rank.log_likelihood_rank, "y": _positive(rank.log_likelihood),
             "tip": f"{method}: rank {rank.log_likelihood_rank:,}, {rank.log_likelihood:.4g} nats"}
            for method, ranks in standings.items() for rank in ranks
        ]  # fmt: skip
        x = Axis("rank by log-likelihood", "whole", log=True)
        y = Axis("− log-likelihood (nats)", log=True, reverse=True)
        chart = curves(rows, x, y, styles(standings), has_lines=False)
        line = alt.Chart(values(all_masks)).mark_line(color="var(--soft)", opacity=0.5)
        chart += line.encode(x=x.of(alt.X, "x"), y=y.of(alt.Y, "y"))
        heading = f"ρ = {ratio:g}, {len(nats):,} masks"
        pictures.append(Picture(f"landscape-{ratio:g}", chart, f"{heading}.", heading))
    return pictures


def cost_curves(points: Sequence[Measured], ratios: Sequence[float]) -> list[Picture]:
    """Held-out score, then log-likelihood, against full-forward equivalents, one per ratio."""
    look = styles(point.setting.method for point in points)
    likelihood = Axis("− held-out log-likelihood (nats)", log=True, reverse=True)
    pictures = []
    for quantity, y in (("score", _SCORE), ("log_likelihood", likelihood)):
        for ratio in ratios:
            rows: list[dict[str, Any]] = []
            for point in points:
                ends: tuple[float, ...] = point.mean(quantity).for_charts
                passes = point.cost("full_forward_equivalents")
                setting = point.setting
                if y.log:
                    ends = tuple(map(_positive, ends))
                budget = "" if setting.budget is None else f", κ = {setting.budget}"
                tip = f"{setting.method}{budget}: {ends[0]:.3g}, {passes:.3g} full passes"
                row = {"series": setting.method, "x": passes, "tip": tip}
                if setting.ratio == ratio:
                    rows.append(row | dict(zip(("y", "low", "high"), ends, strict=True)))
            chart = curves(rows, Axis("full passes (log)", log=True), y, look)
            name, heading = f"{quantity}-{ratio:g}", f"ρ = {ratio:g}"
            text = f"{y.title} at {heading}: " + "; ".join(row["tip"] for row in rows) + "."
            pictures.append(Picture(name, chart, text, heading))
    return pictures


def stability_curves(
    ranks: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, Any]]
) -> list[Picture]:
    """Spearman's rho against the probe budget, and the score against the calibration size."""
    agreement = [
        {"series": f"ρ = {rank['swa_ratio']:g}, {rank['measure'].replace('_', '-')}",
         "x": rank["budget_per_layer"], "y": rank["mean"], "tip": f"{rank['mean']:.2f}"}
        for rank in ranks if rank["mean"] is not None and not rank["same_calibration_set"]
    ]  # fmt: skip
    scores = [
        {"series": f"{size['method']}, ρ = {size['swa_ratio']:g}", "x": size["examples"],
         "y": size["held_out_score"]["mean"], "tip": f"{size['held_out_score']['mean']:.3f}"}
        for size in sizes
    ]  # fmt: skip
    panels = (
        ("agreement", agreement, Axis("evaluations per layer"),
         Axis("mean Spearman ρ between seeds", domain=(-1.05, 1.05))),
        ("size", scores, Axis("calibration examples"), _SCORE),
    )  # fmt: skip
    return [
        Picture(name, curves(rows, x, y, styles(row["series"] for row in rows)),
                f"{y.title} by {x.title}.", f"{y.title} by {x.title}")
        for name, rows, x, y in panels if rows
    ]  # fmt: skip


def jaccard_maps(
    distances: Mapping[float, npt.NDArray[np.float64]], methods: Sequence[str]
) -> list[Picture]:
    """A heat map of Jaccard distances per ratio."""
    pictures = []
    for ratio, matrix in distances.items():
        rows = [
            {"x": methods[column], "y": methods[row], "value": float(value)}
            for (row, column), value in np.ndenumerate(matrix)
        ]
        x = alt.X("x:N", sort=None, title=None, axis=alt.Axis(labelAngle=-60))
        base = alt.Chart(values(rows)).encode(x=x, y=alt.Y("y:N", sort=None, title=None))
        scale = alt.Scale(scheme="magma", domain=(0, 1))
        cells = base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, legend=None))
        ink = alt.condition("datum.value < 0.6", alt.value("white"), alt.value("black"))
        texts = base.mark_text(fontSize=9).encode(text=alt.Text("value:Q", format=".2f"), color=ink)
        chart = (cells + texts).properties(height=26 * len(methods))
        heading = f"ρ = {ratio:g}"
        text = f"Jaccard distances at {heading}, from {matrix.min():.2f} to {matrix.max():.2f}."
        pictures.append(Picture(f"jaccard-{ratio:g}", chart, text, heading))
    return pictures


def _positive(log_likelihood: float) -> float:
    """Distance of a log-likelihood from 0, for a log axis."""
    return max(_MIN_NATS, -log_likelihood)
