"""Quality against cost: every method at every ratio and budget, on held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.commands.study import charts
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, measured
from pipeline.commands.study.studied_model import BOSCH_PLUS, Setting, StudiedModel, variants
from stages.formats import counted
from stages.pages.tables import Table

_PUBLISHED = "bosch"
_PASSES = "full_forward_equivalents"
_TIMES = (_PASSES, "naive_full_forward_equivalents", "seconds")
_COSTS = ("evaluations", *_TIMES)


def study(model: StudiedModel) -> StudyResult:
    """Search with every method, ratio, budget and seed; compare on the same held-out examples."""
    options = model.options
    points = measured_by_budget(model, options.methods)
    tables = [_table(ratio, points) for ratio in options.ratios]
    to_reach = _cost_to_reach(points, options.ratios)
    if to_reach.rows:
        tables.insert(0, to_reach)
    data = {
        "seeds": options.seeds,
        "held_out_examples": len(model.held_out_set),
        "points": [_record(point, _reference(points, point.setting.ratio)) for point in points],
    }
    return StudyResult(
        "cost", "Quality against cost", _text(model), data, tables,
        {"curves": charts.cost_curves(points, options.ratios)},
    )  # fmt: skip


def measured_by_budget(model: StudiedModel, methods: Sequence[str]) -> list[Measured]:
    """`methods` at every ratio and budget, in the order of ratios, methods and budgets."""
    options = model.options
    settings = [
        Setting(method, ratio, budget)
        for ratio in options.ratios
        for method, budget in variants(methods, options.budgets)
    ]
    return measured(model, settings)


def _reference(points: Sequence[Measured], ratio: float) -> Measured | None:
    """The published procedure at its largest budget; None if the study does not include it."""
    published = _of(points, _PUBLISHED, ratio)
    return max(published, key=lambda point: point.setting.budget or 0, default=None)


def _of(points: Sequence[Measured], method: str, ratio: float) -> list[Measured]:
    return [
        point for point in points if (point.setting.method, point.setting.ratio) == (method, ratio)
    ]


def _table(ratio: float, points: Sequence[Measured]) -> Table:
    base = _reference(points, ratio)
    against = "" if base is None else f" (against bosch, κ = {base.setting.budget})"
    header = (
        "method", "κ", "evaluations", "full passes", "without reuse", "seconds", "held-out score",
        f"difference{against}", "held-out log-likelihood", f"difference{against}",
    )  # fmt: skip
    rows = [
        [
            point.setting.method,
            str(point.setting.budget or ""),
            f"{point.cost('evaluations'):g}",
            *(f"{point.cost(name):.1f}" for name in _TIMES),
            *point.cells(base, is_compared=True),
        ]
        for point in points
        if point.setting.ratio == ratio
    ]
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _cost_to_reach(points: Sequence[Measured], ratios: Sequence[float]) -> Table:
    """Cost at which `bosch_plus` equals the published procedure at its largest budget."""
    header = (
        "ρ", "bosch: held-out score", "full passes", "bosch_plus reaches it with",
        "share of the passes", "share without reuse", "share of the time",
    )  # fmt: skip
    rows = []
    for ratio in ratios:
        base, plus = _reference(points, ratio), _of(points, BOSCH_PLUS, ratio)
        if base is None or not plus:
            continue
        goal = _median_score(base)
        good_enough = [point for point in plus if _median_score(point) >= goal]
        cheapest = min(good_enough, key=lambda point: point.cost(_PASSES), default=None)
        reached = ["no budget tried", "", "", ""]
        if cheapest is not None:
            passes, budget = cheapest.cost(_PASSES), cheapest.setting.budget
            shares = [f"{cheapest.cost(name) / base.cost(name):.2f}" for name in _TIMES]
            reached = [f"{passes:.1f} passes (κ = {budget})", *shares]
        rows.append([f"{ratio:g}", f"{goal:.3f}", f"{base.cost(_PASSES):.1f}", *reached])
    return Table.of_rows("Cost to reach the published procedure (medians over seeds)", header, rows)


def _median_score(point: Measured) -> float:
    return float(median(point.results["score"].mean(axis=1).tolist()))


def _record(point: Measured, base: Measured | None) -> dict[str, Any]:
    differences = {} if base is None or base is point else point.differences(base)
    means = {name: values.mean(axis=1).tolist() for name, values in point.results.items()}
    costs = {name: point.cost(name) for name in _COSTS}
    record = point.record("held_out_", budget_per_layer=point.setting.budget, **costs)
    return record | {f"{name}_of_each_seed": mean for name, mean in means.items()} | differences


def _text(model: StudiedModel) -> str:
    return (
        f"`{model.label}`, W = {model.window.size}, "
        f"{model.about_examples}. {counted(model.options.seeds, 'seed')}, each with its own "
        "calibration set. Costs are medians over the seeds; full passes are full-forward "
        "equivalents over the calibration set, with and without exact reuse. They leave out the "
        "pass of a static ranking, which counts in the seconds alone. Seconds are processor time "
        "where the model is on a CPU; passes before a stop count by the clock. Brackets: 95 % "
        "intervals over seeds and examples; differences are paired by example. κ: evaluations per "
        "layer."
    )
