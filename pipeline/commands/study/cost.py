"""Quality against cost: every method at every ratio and budget, on held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bosch.analysis.intervals import Estimate, crossed_difference, crossed_mean
from bosch.progress import progress
from pipeline.commands.paths import model_label
from pipeline.commands.study import charts
from pipeline.commands.study.page import StudyResult, interval_text
from pipeline.commands.study.studied_model import (
    OURS,
    Results,
    SearchOutcome,
    StudiedModel,
    variants,
)
from stages.pages.tables import Table
from stages.search.stage import SearchConfig

PUBLISHED = "bosch"


@dataclass(frozen=True)
class Point:
    """One method at one ratio and budget over all seeds; costs are medians.

    `exact` and `log_likelihood` are those of the held-out examples, [S, E].
    """

    method: str
    ratio: float
    budget: int | None
    evaluations: float
    passes: float
    passes_without_reuse: float
    seconds: float
    exact: Results
    log_likelihood: Results

    @property
    def score(self) -> Estimate:
        """Mean held-out score."""
        return crossed_mean(self.exact, is_score=True)

    @property
    def likelihood(self) -> Estimate:
        """Mean held-out log-likelihood."""
        return crossed_mean(self.log_likelihood)


def study(model: StudiedModel) -> StudyResult:
    """Search with every method, ratio, budget and seed; compare on the same held-out examples."""
    options = model.options
    points = measured(model, options.methods)
    tables = [_table(ratio, points) for ratio in options.ratios]
    reach = _cost_to_reach(points, options.ratios)
    if reach.groups[0].rows:
        tables.insert(0, reach)
    data = {
        "seeds": options.seeds,
        "held_out_examples": len(model.held_out_set),
        "points": [_record(point, points) for point in points],
    }
    return StudyResult(
        "cost", "Quality against cost", _text(model), data, tables,
        {"curves": charts.cost_curves(points, options.ratios)},
    )  # fmt: skip


def measured(model: StudiedModel, methods: Sequence[str]) -> list[Point]:
    """All points of `methods`, in the order of ratios, methods and budgets."""
    options = model.options
    settings = [
        (ratio, method, budget)
        for ratio in options.ratios
        for method, budget in variants(methods, options.budgets)
    ]
    points = []
    with progress(len(settings) * options.seeds, "searches", "searches") as bar:
        for ratio, method, budget in settings:
            runs = []
            for seed in range(options.seeds):
                runs.append(model.search(method, ratio, seed, budget=budget))
                bar.update()
            points.append(_point(model, method, ratio, budget, runs))
    return points


def _point(
    model: StudiedModel, method: str, ratio: float, budget: int | None, runs: list[SearchOutcome]
) -> Point:
    exact, likelihood = model.held_out_over_seeds([run.mask for run in runs])
    costs = [run.costs for run in runs]
    return Point(
        method=method,
        ratio=ratio,
        budget=budget,
        evaluations=median(c["evaluations"] for c in costs),
        passes=median(c["full_forward_equivalents"] for c in costs),
        passes_without_reuse=median(c["naive_full_forward_equivalents"] for c in costs),
        seconds=median(c["seconds"] for c in costs),
        exact=exact,
        log_likelihood=likelihood,
    )


def reference(points: Sequence[Point], ratio: float) -> Point | None:
    """The published procedure at its largest budget."""
    own = [p for p in points if p.method == PUBLISHED and p.ratio == ratio]
    return max(own, key=lambda p: p.budget or 0, default=None)


def _table(ratio: float, points: Sequence[Point]) -> Table:
    base = reference(points, ratio)
    against = "" if base is None else f" (against bosch, κ = {base.budget})"
    header = (
        "method", "κ", "evaluations", "full passes", "without reuse", "seconds", "held-out score",
        f"difference{against}", "held-out log-likelihood", f"difference{against}",
    )  # fmt: skip
    rows = []
    for point in points:
        if point.ratio != ratio:
            continue
        rows.append(
            [
                point.method,
                "" if point.budget is None else str(point.budget),
                f"{point.evaluations:.0f}",
                f"{point.passes:.1f}",
                f"{point.passes_without_reuse:.1f}",
                f"{point.seconds:.1f}",
                interval_text(point.score),
                _difference(point.exact, None if base is None else base.exact, is_score=True),
                interval_text(point.likelihood, 2),
                _difference(point.log_likelihood, None if base is None else base.log_likelihood),
            ]
        )
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _difference(own: Results, base: Results | None, *, is_score: bool = False) -> str:
    if base is None or own is base:
        return ""
    return interval_text(crossed_difference(own, base, is_score=is_score), 3 if is_score else 2)


def _cost_to_reach(points: Sequence[Point], ratios: Sequence[float]) -> Table:
    """Cost at which `bosch_plus` is as good as the published procedure at its largest budget."""
    header = (
        "ρ", "bosch: held-out score", "full passes", "bosch_plus reaches it with",
        "share of the passes", "share without reuse", "share of the time",
    )  # fmt: skip
    rows = []
    for ratio in ratios:
        base = reference(points, ratio)
        ours = [p for p in points if p.method == OURS and p.ratio == ratio]
        if base is None or not ours:
            continue
        goal = median(base.exact.mean(axis=1).tolist())
        enough = [p for p in ours if median(p.exact.mean(axis=1).tolist()) >= goal]
        first = min(enough, key=lambda p: p.passes, default=None)
        rows.append(
            [f"{ratio:g}", f"{goal:.3f}", f"{base.passes:.1f}"]
            + (
                ["no budget tried", "", "", ""]
                if first is None
                else [
                    f"{first.passes:.1f} passes (κ = {first.budget})",
                    f"{first.passes / base.passes:.2f}",
                    f"{first.passes_without_reuse / base.passes_without_reuse:.2f}",
                    f"{first.seconds / base.seconds:.2f}",
                ]
            )
        )
    return Table.of_rows("Cost to reach the published procedure (medians over seeds)", header, rows)


def _record(point: Point, points: Sequence[Point]) -> dict[str, Any]:
    base = reference(points, point.ratio)
    record: dict[str, Any] = {
        "method": point.method,
        "swa_ratio": point.ratio,
        "budget_per_layer": point.budget,
        "evaluations": point.evaluations,
        "full_forward_equivalents": point.passes,
        "naive_full_forward_equivalents": point.passes_without_reuse,
        "seconds": point.seconds,
        "held_out_score": point.score._asdict(),
        "held_out_log_likelihood": point.likelihood._asdict(),
        "score_of_each_seed": point.exact.mean(axis=1).tolist(),
        "log_likelihood_of_each_seed": point.log_likelihood.mean(axis=1).tolist(),
    }
    if base is not None and base is not point:
        record["score_difference"] = crossed_difference(
            point.exact, base.exact, is_score=True
        )._asdict()
        record["log_likelihood_difference"] = crossed_difference(
            point.log_likelihood, base.log_likelihood
        )._asdict()
    return record


def _text(model: StudiedModel) -> str:
    recipe, options = model.recipe, model.options
    return (
        f"`{model_label(recipe.model.path)}`, W = {recipe[SearchConfig].window_size}, "
        f"{model.about_examples}. {options.seeds} seeds, each with its own "
        "calibration set. Costs are medians over the seeds; full passes are full-forward "
        "equivalents over the calibration set, with exact reuse and without, less the pass "
        "of a static ranking, which only the seconds hold. Seconds are processor time where the "
        "model is on a CPU. Brackets: 95 % intervals over seeds and "
        "examples; differences are paired by example. κ: evaluations per layer."
    )
