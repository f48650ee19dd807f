"""Quality against cost: every method at every ratio and budget, on held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.commands.study import charts
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, measured
from pipeline.commands.study.studied_model import OURS, Setting, StudiedModel, variants
from stages.pages.tables import Table

PUBLISHED = "bosch"
_COSTS = ("evaluations", "full_forward_equivalents", "naive_full_forward_equivalents", "seconds")


def study(model: StudiedModel) -> StudyResult:
    """Search with every method, ratio, budget and seed; compare on the same held-out examples."""
    options = model.options
    points = budgets(model, options.methods)
    tables = [_table(ratio, points) for ratio in options.ratios]
    reach = _cost_to_reach(points, options.ratios)
    if reach.rows:
        tables.insert(0, reach)
    data = {
        "seeds": options.seeds,
        "held_out_examples": len(model.held_out_set),
        "points": [_record(point, reference(points, point.setting.ratio)) for point in points],
    }
    return StudyResult(
        "cost", "Quality against cost", _text(model), data, tables,
        {"curves": charts.cost_curves(points, options.ratios)},
    )  # fmt: skip


def budgets(model: StudiedModel, methods: Sequence[str]) -> list[Measured]:
    """`methods` at every ratio and budget, in the order of ratios, methods and budgets."""
    options = model.options
    return measured(
        model,
        [
            Setting(method, ratio, budget)
            for ratio in options.ratios
            for method, budget in variants(methods, options.budgets)
        ],
    )


def reference(points: Sequence[Measured], ratio: float) -> Measured | None:
    """The published procedure at its largest budget."""
    own = _of(points, PUBLISHED, ratio)
    return max(own, key=lambda point: point.setting.budget or 0, default=None)


def _of(points: Sequence[Measured], method: str, ratio: float) -> list[Measured]:
    return [p for p in points if (p.setting.method, p.setting.ratio) == (method, ratio)]


def _table(ratio: float, points: Sequence[Measured]) -> Table:
    base = reference(points, ratio)
    against = "" if base is None else f" (against bosch, κ = {base.setting.budget})"
    header = (
        "method", "κ", "evaluations", "full passes", "without reuse", "seconds", "held-out score",
        f"difference{against}", "held-out log-likelihood", f"difference{against}",
    )  # fmt: skip
    rows = [
        [
            point.setting.method,
            "" if point.setting.budget is None else str(point.setting.budget),
            f"{point.cost('evaluations'):.0f}",
            *(f"{point.cost(name):.1f}" for name in _COSTS[1:]),
            *point.cells(base, is_compared=True),
        ]
        for point in points
        if point.setting.ratio == ratio
    ]
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _cost_to_reach(points: Sequence[Measured], ratios: Sequence[float]) -> Table:
    """Cost at which `bosch_plus` is as good as the published procedure at its largest budget."""
    header = (
        "ρ", "bosch: held-out score", "full passes", "bosch_plus reaches it with",
        "share of the passes", "share without reuse", "share of the time",
    )  # fmt: skip
    rows, passes = [], _COSTS[1]
    for ratio in ratios:
        base, ours = reference(points, ratio), _of(points, OURS, ratio)
        if base is None or not ours:
            continue
        goal = _median_score(base)
        enough = [point for point in ours if _median_score(point) >= goal]
        first = min(enough, key=lambda point: point.cost(passes), default=None)
        reached = ["no budget tried", "", "", ""]
        if first is not None:
            shares = [f"{first.cost(name) / base.cost(name):.2f}" for name in _COSTS[1:]]
            reached = [f"{first.cost(passes):.1f} passes (κ = {first.setting.budget})", *shares]
        rows.append([f"{ratio:g}", f"{goal:.3f}", f"{base.cost(passes):.1f}", *reached])
    return Table.of_rows("Cost to reach the published procedure (medians over seeds)", header, rows)


def _median_score(point: Measured) -> float:
    return float(median(point.results["score"].mean(axis=1).tolist()))


def _record(point: Measured, base: Measured | None) -> dict[str, Any]:
    is_compared = base is not None and base is not point
    return {
        "method": point.setting.method,
        "swa_ratio": point.setting.ratio,
        "budget_per_layer": point.setting.budget,
        **{name: point.cost(name) for name in _COSTS},
        **point.record("held_out_"),
        **{f"{name}_of_each_seed": of.mean(axis=1).tolist() for name, of in point.results.items()},
        **(point.differences(base) if base is not None and is_compared else {}),
    }


def _text(model: StudiedModel) -> str:
    return (
        f"`{model.label}`, W = {model.window.size}, "
        f"{model.about_examples}. {model.options.seeds} seeds, each with its own "
        "calibration set. Costs are medians over the seeds; full passes are full-forward "
        "equivalents over the calibration set, with exact reuse and without, less the pass "
        "of a static ranking, which only the seconds hold. Seconds are processor time where the "
        "model is on a CPU. Brackets: 95 % intervals over seeds and "
        "examples; differences are paired by example. κ: evaluations per layer."
    )
