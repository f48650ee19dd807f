"""Files of a comparison: one HTML page, Markdown with a plot, CSV of every score, and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, fields, replace
from itertools import groupby, product
from typing import Any

import numpy as np

from bosch.analysis.intervals import crossed_mean
from bosch.files import write_json, write_text
from bosch.search.methods import METHODS
from pipeline.commands.compare.comparison import (
    AgainstHighest,
    Combination,
    Comparison,
    Models,
    Result,
    ScoreRow,
    group_of,
)
from stages.evaluate.scores import HYBRID, ORIGINAL, read_samples
from stages.formats import format_length, format_score, signed, with_interval
from stages.pages.charts import Picture, ranking, save_panels
from stages.pages.page import render
from stages.pages.tables import Cell, Group, Table
from stages.report.charts import LOOK, POINTS, ranking_row
from stages.report.predictions import anchor, samples_by_model
from stages.report.results import SHOWN_SAMPLES, collect_predictions
from stages.train.stage import checkpoint_name

REPORT = "compare.json"
_PAGE = "pipeline/commands/compare/page.html"
_PREDICTIONS = "pipeline/commands/compare/predictions.html"
_ENGINES = ("generate", "vllm")
_KINDS: tuple[Models, ...] = ("untrained", "trained")
_ABOUT = (
    "Scores are averages on held-out samples, in points of 100, with 95 % intervals over samples "
    "and, of several, seeds of the search. In each column the highest score is bold where it is "
    "shown to be above all others; else those that are not shown to be below it are underlined. "
    "These are paired tests on the same samples at 5 %, corrected for all pairs of a table (Holm)."
)
_PAPER = " The columns 'paper' hold the figures of BOSCH, Table 1."
_COSTS = (
    "The cache is that of a request of the longest evaluated length, computed from the mask, as a "
    "share of the original's: in generate, and in vLLM on one large GPU where it serves all "
    "seeds. S(z) is the exact-match rate on the calibration set. Full passes count the work of the "
    "search alone: evaluations reused from another combination are included at their cost there. "
    "Other time is that outside evaluations: the solver's, or the ranking of the heads by a static "
    "method."
)


def write_comparison(comparison: Comparison) -> None:
    """Write compare.json, .html, .csv and .md, and with the last combination compare.png."""
    write_text(comparison.folder / "compare.md", markdown(comparison))
    write_text(comparison.folder / "compare.html", page(comparison))
    write_text(comparison.folder / "compare.csv", csv_table(comparison).csv())
    if comparison.is_complete:
        pictures = [chart for suite in comparison.suites for chart in _pictures(comparison, suite)]
        save_panels(pictures, comparison.folder / "compare.png")
    content = {
        "format": 1,
        "recipe": comparison.recipe,
        "model": comparison.model,
        "methods": comparison.methods,
        "ratios": comparison.ratios,
        "with_training": comparison.with_training,
        "complete": comparison.is_complete,
        "combinations": [_record(comparison, run) for run in comparison.combinations],
        "tests": [
            asdict(test)
            for suite, models in product(comparison.suites, _KINDS)
            for test in comparison.tests(models, suite)
        ],
    }
    write_json(comparison.folder / REPORT, content)


def _record(comparison: Comparison, combination: Combination) -> dict[str, Any]:
    """A combination without the scores of its samples, which are in the stage's samples.jsonl."""
    record = asdict(combination)
    del record["own_seed"]
    if combination in comparison.results:
        record |= asdict(replace(comparison.results[combination], samples={}))
        del record["samples"]
    if combination in comparison.failures:
        record["failure"] = comparison.failures[combination]
    return record


def write_predictions(comparison: Comparison, combination: Combination) -> None:
    """Write the page with a finished combination's predictions; replaces an earlier one."""
    path = comparison.folder / _predictions_file(comparison, combination)
    for earlier in path.parent.glob("predictions-*.html"):
        earlier.unlink()
    stages = [path.parent / name for name in ("original", "evaluate")]
    records = collect_predictions(record for stage in stages for record in read_samples(stage))
    text = render(
        _PREDICTIONS, has_charts=False, title=f"{comparison.recipe}: {combination}", subtitle="",
        predictions=samples_by_model(records), shown_samples=SHOWN_SAMPLES,
    )  # fmt: skip
    write_text(path, text)


def _predictions_file(comparison: Comparison, combination: Combination) -> str:
    """Path of a page of predictions from the comparison's folder; contains the evaluation's key."""
    key = comparison.results[combination].keys["evaluate"]
    return f"{combination.folder}/predictions-{key[:12]}.html"


def page(comparison: Comparison) -> str:
    """The self-contained HTML page: a picture for each suite and ratio, the tables, and costs."""
    rows = [row for result in comparison.results.values() for row in result.rows]
    lengths = sorted({row.length for row in rows if row.length})
    return render(
        _PAGE,
        title=f"Methods compared: {comparison.recipe}",
        subtitle=f"Model: {comparison.model}",
        notes=[*_unfinished(comparison), *comparison.missing],
        about=_ABOUT + (_PAPER if comparison.paper else ""),
        suites={suite: list(_pictures(comparison, suite)) for suite in comparison.suites},
        tables=[*score_tables(comparison), *significance_tables(comparison)],
        task_tables=list(task_tables(comparison)),
        filters={
            "task": list(dict.fromkeys(row.task for row in rows if row.task)),
            "length": [format_length(length) for length in lengths],
        },
        about_costs=_COSTS,
        costs=_cost_table(comparison),
    )


def _unfinished(comparison: Comparison) -> Iterator[str]:
    if not comparison.is_complete:
        finished, combinations = len(comparison.results), len(comparison.combinations)
        yield f"{finished} of {combinations} combinations are finished."


def _pictures(comparison: Comparison, suite: str) -> Iterator[Picture]:
    """Bars of the methods in a suite for each ratio, the lowest score first."""
    level: tuple[str, float] | None = None
    if original := comparison.originals.get((suite, "", 0)):
        level = f"original {format_score(original[1].score)}", original[1].score
    axis = POINTS._replace(title=f"{suite.capitalize()} average (points of 100)")
    for ratio in comparison.ratios:
        bars = []
        for models, method in product(_KINDS, comparison.methods):
            average = _average(comparison, models, method, ratio, suite)
            if average is not None:
                label = METHODS[method].label + (", trained" if models == "trained" else "")
                bars.append(ranking_row(label, models, *average))
        if bars:
            bars.sort(key=lambda row: row["x"])
            chart = ranking(bars, axis, LOOK, reference=level, step=26)
            text = ", ".join(f"{bar['label']} {bar['text']}" for bar in bars)
            text += f"; {level[0]}." if level else "."
            yield Picture(f"{suite}-{ratio:g}", chart, text, f"ρ = {ratio:g}")


def score_tables(comparison: Comparison) -> Iterator[Table]:
    """A table of untrained hybrids for each suite and, with training, one of last checkpoints."""
    trained = [
        result.trained_tokens for result in comparison.results.values() if result.trained_tokens
    ]
    descriptions = {
        "untrained": "without training",
        "trained": "after training" + (f" on {trained[0]:,} tokens" if trained else ""),
    }
    kinds = _KINDS[: 1 + comparison.with_training]
    for number, (suite, models) in enumerate(product(comparison.suites, kinds), start=1):
        title = f"Table {number}: {suite} average, {descriptions[models]}"
        yield _score_table(comparison, models, suite, title)


def _score_table(comparison: Comparison, models: Models, suite: str, title: str) -> Table:
    paper = comparison.paper.get(suite, {}) if models == "untrained" else {}
    _, original = comparison.originals.get((suite, "", 0), (None, None))
    # The original does not depend on the ratio, so every column has the same score.
    original_text = format_score(None)
    if original is not None:
        original_text = with_interval(original.score, original.low, original.high)
    tests = comparison.tests(models, suite)
    header = ["Method"]
    rows = {ORIGINAL: ["Original"]} | {name: [METHODS[name].label] for name in comparison.methods}
    for ratio in comparison.ratios:
        has_tasks = any(row.task for _, row in comparison.rows(models, ratio=ratio))
        target = f"#tasks-{ratio:g}-{models}" if has_tasks else ""
        header.append(Cell(f"ρ = {ratio:g}", target=target))
        averages = {
            method: _average(comparison, models, method, ratio, suite)
            for method in comparison.methods
        }
        scored = [method for method, average in averages.items() if average is not None]
        marks = _marks([test for test in tests if test.ratio == ratio], scored)
        rows[ORIGINAL].append(original_text)
        for method, average in averages.items():
            rows[method].append(Cell(_average_text(average), marks.get(method, 0)))
        if ratio in paper:
            header.append("paper")
            for method, row in rows.items():
                row.append(format_score(paper[ratio].get(method)))
    groups = [
        Group([rows[method] for method in methods], heading)
        for heading, methods in groupby(comparison.methods, group_of)
    ]
    return Table(title, header, [Group([rows[ORIGINAL]]), *groups], text_columns=1)


def _marks(tests: Sequence[AgainstHighest], scored: Sequence[str]) -> dict[str, int]:
    """Marks of a column's cells by method, as in `Cell`: 1 is bold, 2 is underlined.

    1 for the highest if every other method is significantly lower; otherwise 2 for the highest and
    each method that is not significantly lower. A method `scored` on other samples than the highest
    is not tested and counts as not significantly lower.
    """
    if not tests:
        return {}
    lower = {test.method for test in tests if test.is_lower}
    near = [method for method in scored if method not in lower]
    return dict.fromkeys(near, 1 if len(near) == 1 else 2)


def _average(
    comparison: Comparison, models: Models, method: str, ratio: float, suite: str
) -> tuple[float, float, float, str] | None:
    """A suite's mean over seeds, two ends and their kind: "interval" or "seeds from".

    An interval is over samples and seeds. If seeds were scored on different samples, the ends are
    the lowest and the highest average of a seed.
    """
    rows = comparison.averages(models, method, ratio, suite)
    if not rows:
        return None
    if len(rows) == 1:
        return rows[0].score, rows[0].low, rows[0].high, "interval"
    mean = statistics.fmean(row.score for row in rows)
    samples = comparison.samples(models, method, ratio, suite)
    if len({(sample.places, sample.counts) for sample in samples}) != 1:
        lowest, *_, highest = sorted(row.score for row in rows)
        return mean, lowest, highest, "seeds from"
    values, counts = np.stack([sample.values for sample in samples]), samples[0].counts
    interval = crossed_mean(values, is_score=True, counts=counts, weights=samples[0].weights)
    assert interval.low is not None and interval.high is not None
    return mean, 100 * interval.low, 100 * interval.high, "interval"


def _average_text(average: tuple[float, float, float, str] | None) -> str:
    if average is None:
        return "–"
    mean, low, high, kind = average
    if kind == "interval":
        return with_interval(mean, low, high)
    return f"{mean:.1f} (seeds {low:.1f}–{high:.1f})"


def significance_tables(comparison: Comparison) -> Iterator[Table]:
    """Difference of every method from the highest of its ratio, with its test, for each suite."""
    header = ("Method", "difference", "95 % interval", "p, Holm", "shown lower")
    for suite, models in product(comparison.suites, _KINDS):
        tests = comparison.tests(models, suite)
        groups = [
            Group(list(map(_test_row, rows)), f"ρ = {ratio:g}, against {METHODS[highest].label}")
            for (ratio, highest), rows in groupby(tests, lambda test: (test.ratio, test.highest))
        ]
        if groups:
            title = f"Against the highest: {suite} average, {models}"
            yield Table(title, header, groups, text_columns=1)


def _test_row(test: AgainstHighest) -> list[str]:
    ends = f"{signed(test.low, 1)} to {signed(test.high, 1)}"
    p_value = "< 0.001" if test.p_holm < 0.001 else f"{test.p_holm:.3f}"
    is_lower = "yes" if test.is_lower else "no"
    return [METHODS[test.method].label, signed(test.difference, 1), ends, p_value, is_lower]


def task_tables(comparison: Comparison) -> Iterator[Table]:
    """A table of tasks by methods for each ratio, and for untrained and trained hybrids."""
    originals = comparison.originals
    for ratio in comparison.ratios:
        methods = [method for method in comparison.methods if comparison.results_of(method, ratio)]
        header = ["task", "Original", *(METHODS[method].label for method in methods)]
        for models in _KINDS:
            by_method = {
                method: [pair for pair in comparison.rows(models, method, ratio) if pair[1].task]
                for method in methods
            }
            places = dict.fromkeys(row.place for scored in by_method.values() for _, row in scored)
            rows = []
            for place in places:
                _, task, length = place
                at = format_length(length) if length else ""
                name = Cell(f"{task} at {at}" if at else task, task=task, length=at)
                columns = [[originals[place]] if place in originals else []]
                for scored in by_method.values():
                    columns.append([pair for pair in scored if pair[1].place == place])
                rows.append([name, *(_task_cell(comparison, scores) for scores in columns)])
            if rows:
                title, table_id = f"ρ = {ratio:g}, {models}", f"tasks-{ratio:g}-{models}"
                yield Table(title, header, [Group(rows)], 1, name=table_id)


def _task_cell(comparison: Comparison, rows: Sequence[tuple[Combination, ScoreRow]]) -> Cell:
    """The mean over seeds, or a dash; each seed's score links to its predictions."""
    if not rows:
        return Cell(format_score(None), share=0.0)
    scores = [row.score for _, row in rows]
    targets = [_target(comparison, *row) for row in rows]
    mean = statistics.fmean(scores)
    text, share = format_score(mean), mean / 100
    if len(rows) == 1:
        [(_, row)] = rows
        interval = f"{format_score(row.low)}–{format_score(row.high)}"
        return Cell(text, 0, targets[0], [(interval, "")], share)
    links = list(zip(map(format_score, scores), targets, strict=True))
    return Cell(text, 0, "", links, share)


def _target(comparison: Comparison, combination: Combination, row: ScoreRow) -> str:
    """The link to the predictions of a score, relative to the comparison's folder."""
    names = {"original": ORIGINAL, "untrained": HYBRID}
    tokens = comparison.results[combination].trained_tokens or 0
    name = names.get(row.models) or checkpoint_name(tokens)
    file = _predictions_file(comparison, combination)
    return f"{file}#{anchor(name, row.suite, row.task, row.length)}"


def csv_table(comparison: Comparison) -> Table:
    """Every score of the original and of every combination by task and length, with intervals."""
    names = [field.name for field in fields(ScoreRow)]
    header = ("method", "swa_ratio", "seed", *names, *(f"cache_{name}" for name in _ENGINES))
    original_cache: Mapping[str, float] = dict.fromkeys(_ENGINES, 1.0)
    scored: list[tuple[tuple[object, ...], ScoreRow, Mapping[str, float]]] = [
        ((ORIGINAL, 0.0, ""), row, original_cache) for _, row in comparison.originals.values()
    ]
    for run, row in (pair for models in _KINDS for pair in comparison.rows(models)):
        scored.append(((run.method, run.ratio, run.seed), row, comparison.results[run].cache))
    lines = [
        [*map(str, (*setting, *astuple(row))), *(str(cache.get(name, "")) for name in _ENGINES)]
        for setting, row, cache in scored
        if row.task
    ]
    return Table.of_rows("", header, lines)


def markdown(comparison: Comparison) -> str:
    """The tables by suite and the costs, as Markdown, without the tables by task."""
    about = _ABOUT + (_PAPER if comparison.paper else "")
    blocks = [
        f"# Methods compared: {comparison.recipe}\n",
        f"Model: `{comparison.model}`. {about}\n",
        *(f"{sentence}\n" for sentence in [*_unfinished(comparison), *comparison.missing]),
        *(
            table.markdown()
            for table in [*score_tables(comparison), *significance_tables(comparison)]
        ),
        "## Calibration scores and costs\n",
        f"{_COSTS}\n",
        _cost_table(comparison).markdown_table(),
    ]
    if comparison.is_complete:
        blocks.append("![Scores of every method at every ratio](compare.png)\n")
    return "\n".join(blocks)


def _cost_table(comparison: Comparison) -> Table:
    """Means over seeds: S(z), and the work of the search, reused evaluations included."""
    header = (
        "Method",
        "ρ",
        "cache, generate",
        "cache, vLLM",
        "S(z)",
        "log-likelihood",
        "evaluations",
        "full passes",
        "other time, seconds",
    )
    rows = [
        _cost_row(METHODS[method].label, ratio, results)
        for method, ratio in product(comparison.methods, comparison.ratios)
        if (results := comparison.results_of(method, ratio))
    ]
    return Table("Calibration scores and costs", header, (Group(rows),), text_columns=1)


def _cost_row(label: str, ratio: float, results: Sequence[Result]) -> list[str]:
    def mean(name: str) -> float:
        return statistics.fmean(result.costs.get(name, 0.0) for result in results)

    score = statistics.fmean(result.calibration_score for result in results)
    likelihood = statistics.fmean(result.calibration_log_likelihood for result in results)
    passes = mean("full_forward_equivalents") + mean("reused_full_forward_equivalents")
    shares = [
        [result.cache[name] for result in results if name in result.cache] for name in _ENGINES
    ]
    return [
        label,
        f"{ratio:g}",
        *(f"{statistics.fmean(row):.1%}" if len(row) == len(results) else "–" for row in shares),
        f"{score:.3f}",
        f"{likelihood:.3f}",
        f"{mean('evaluations'):,.0f}",
        f"{passes:,.1f}",
        f"{mean('solver_seconds'):,.1f}",
    ]
