"""What it costs to choose heads in units of g, as `search.head_granularity` does."""

from __future__ import annotations

from dataclasses import dataclass

from bosch.analysis.intervals import Estimate, crossed_difference, crossed_mean
from bosch.budget import check_granularity
from bosch.progress import progress
from pipeline.commands.paths import model_label
from pipeline.commands.study.page import StudyResult, interval_text
from pipeline.commands.study.studied_model import Results, StudiedModel, variants
from stages.pages.tables import Table
from stages.search.stage import SearchConfig


@dataclass(frozen=True)
class Point:
    """Held-out exact match and log-likelihood of one method, ratio and granularity, [S, E]."""

    method: str
    ratio: float
    granularity: int
    exact: Results
    log_likelihood: Results


def study(model: StudiedModel) -> StudyResult:
    """Search at every granularity; compare with single heads on the same held-out examples.

    Raises UserError for a ratio that has no mask at one of the granularities.
    """
    options = model.options
    sizes = sorted({1, *options.granularities})
    for ratio in options.ratios:
        for size in sizes:
            check_granularity(*model.shape, ratio, size)
    # The largest budget of each method.
    budgets = dict(variants(options.methods, options.budgets))
    points = []
    runs = len(options.ratios) * len(options.methods) * len(sizes) * options.seeds
    with progress(runs, "searches", "searches") as bar:
        for ratio in options.ratios:
            for method in options.methods:
                for size in sizes:
                    masks = []
                    for seed in range(options.seeds):
                        outcome = model.search(
                            method, ratio, seed, budget=budgets[method], granularity=size
                        )
                        masks.append(outcome.mask)
                        bar.update()
                    points.append(Point(method, ratio, size, *model.held_out_over_seeds(masks)))
    rows = [_row(point, next(p for p in points if _single(p, point))) for point in points]
    data = {
        "seeds": options.seeds,
        "budget_per_layer": budgets,
        "held_out_examples": len(model.held_out_set),
        "points": rows,
    }
    tables = [_table(ratio, rows) for ratio in options.ratios]
    return StudyResult("granularity", "Heads chosen in units", _text(model), data, tables)


def _single(candidate: Point, point: Point) -> bool:
    """Whether `candidate` is the method's search among single heads at this ratio."""
    same = (candidate.method, candidate.ratio) == (point.method, point.ratio)
    return same and candidate.granularity == 1


def _row(point: Point, single: Point) -> dict[str, object]:
    return {
        "method": point.method,
        "swa_ratio": point.ratio,
        "head_granularity": point.granularity,
        "score": crossed_mean(point.exact, is_score=True)._asdict(),
        "log_likelihood": crossed_mean(point.log_likelihood)._asdict(),
        "score_difference": crossed_difference(point.exact, single.exact, is_score=True)._asdict(),
        "log_likelihood_difference": crossed_difference(
            point.log_likelihood, single.log_likelihood
        )._asdict(),
    }


def _table(ratio: float, rows: list[dict[str, object]]) -> Table:
    header = (
        "method", "g", "held-out score", "difference from g = 1", "held-out log-likelihood",
        "difference from g = 1",
    )  # fmt: skip
    names = ("score", "score_difference", "log_likelihood", "log_likelihood_difference")
    lines = []
    for row in rows:
        if row["swa_ratio"] != ratio:
            continue
        size = row["head_granularity"]
        cells = [
            "" if "difference" in name and size == 1 else interval_text(
                Estimate(**row[name]), 2 if "likelihood" in name else 3  # type: ignore[arg-type]
            )
            for name in names
        ]  # fmt: skip
        lines.append([str(row["method"]), str(size), *cells])
    return Table.of_rows(f"ρ = {ratio:g}", header, lines)


def _text(model: StudiedModel) -> str:
    recipe, options = model.recipe, model.options
    layers, heads = model.shape
    return (
        f"`{model_label(recipe.model.path)}`, {layers} layers of {heads} KV heads, "
        f"W = {recipe[SearchConfig].window_size}, {model.about_examples}. {options.seeds} seeds, "
        f"κ = {max(options.budgets)}, ten times that in bosch_plus, whose budget is a tenth. "
        "With g the full heads of every layer are a multiple of g. "
        "bosch_plus and learned_gates form units of heads to which the gradient at the original "
        "model gives similar worth, rankings of heads with similar scores, all others of "
        "neighbouring heads. Brackets: 95 % intervals over seeds and examples; "
        "differences are paired by example."
    )
