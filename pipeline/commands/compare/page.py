"""Files of a comparison: one HTML page, Markdown with a plot, CSV of every score, and JSON."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from functools import partial
from html import escape

from bosch.files import read_json, write_json, write_text
from pipeline.commands.compare.comparison import (
    Comparison,
    Models,
    Result,
    Score,
    TaskRow,
    group_of,
    label_of,
)
from pipeline.commands.compare.plots import score_plot
from pipeline.commands.compare.tasks import marked, table_id, task_places, tasks_section
from pipeline.commands.plots import save
from pipeline.commands.tables import Group, Table
from stages.evaluate.scores import ORIGINAL
from stages.report import figures, markup
from stages.report.charts import STYLE

REPORT = "compare.json"


def write_comparison(comparison: Comparison) -> None:
    """Write compare.json, .html, .csv and .md, and with the last combination compare.png."""
    complete = len(comparison.results) == len(comparison.combinations)
    content = {
        "format": 1,
        "recipe": comparison.recipe,
        "model": comparison.model,
        "methods": comparison.methods,
        "ratios": comparison.ratios,
        "with_training": comparison.with_training,
        "complete": complete,
        "combinations": [
            {
                "method": combination.method,
                "ratio": combination.ratio,
                "seed": combination.seed,
                **(
                    asdict(comparison.results[combination])
                    if combination in comparison.results
                    else {}
                ),
                **(
                    {"failure": comparison.failures[combination]}
                    if combination in comparison.failures
                    else {}
                ),
            }
            for combination in comparison.combinations
        ],
    }
    json_file = comparison.folder / REPORT
    if read_json(json_file) == json.loads(json.dumps(content)):
        return
    write_text(comparison.folder / "compare.md", markdown(comparison))
    write_text(comparison.folder / "compare.html", page(comparison))
    write_text(comparison.folder / "compare.csv", csv_table(comparison))
    if complete:
        save(score_plot(comparison), comparison.folder / "compare.png")
    write_json(json_file, content)


def score_tables(comparison: Comparison) -> Iterator[Table]:
    """Table 1, untrained hybrids, and with training Table 2, the last checkpoints."""
    number = 0
    tokens = next((r.trained_tokens for r in comparison.results.values()), None)
    kinds: list[tuple[Models, str]] = [("untrained", "without training")]
    if comparison.with_training:
        kinds.append(("trained", f"after training on {tokens or 0:,} tokens"))
    for suite, original in comparison.originals.items():
        for models, words in kinds:
            number += 1
            title = f"Table {number}: {suite} average, {words}"
            yield _score_table(comparison, models, suite, original, title)


def _score_table(
    comparison: Comparison, models: Models, suite: str, original: Score, title: str
) -> Table:
    columns = []
    # The published averages are of needle tasks, untrained.
    paper = comparison.paper if (models, suite) == ("untrained", "needle") else {}
    for ratio in comparison.ratios:
        values = {m: comparison.values(m, ratio, models, suite) for m in comparison.methods}
        columns.append(marked(values))
    targets = {}
    header, rows_of = ["Method"], {method: [label_of(method)] for method in comparison.methods}
    original_row = ["Original"]
    for ratio, column in zip(comparison.ratios, columns, strict=True):
        header.append(f"ρ = {ratio:g}")
        if task_places(comparison, ratio, models):
            targets[header[-1]] = f"#{table_id(ratio, models)}"
        # The original model has no sliding head: its score stands in every column to compare with.
        original_row.append(f"{original.average:.1f}")
        if ratio in paper:
            header.append("paper")
            original_row.append(_paper_text(paper[ratio], "original"))
        for method, row in rows_of.items():
            row.append(column[method])
            if ratio in paper:
                row.append(_paper_text(paper[ratio], method))
    groups: dict[str, list[list[str]]] = {}
    for method in comparison.methods:
        groups.setdefault(group_of(method), []).append(rows_of[method])
    return Table(
        title,
        header,
        [Group([original_row]), *(Group(rows, heading) for heading, rows in groups.items())],
        text_columns=1,
        targets=targets,
    )


def _paper_text(scores: Mapping[str, float], method: str) -> str:
    return f"{scores[method]:.1f}" if method in scores else "–"


_ABOUT = (
    "Scores are averages on held-out samples, in points of 100; ± is the standard deviation over "
    "seeds of the search. In each column the highest score is bold and the second underlined; no "
    "test says that one is better than the next."
)
_PAPER = " The columns 'paper' hold the figures of BOSCH, Table 1."
_COSTS = (
    "S(z) is the exact-match rate on the calibration set. Full passes count the work of the search "
    "alone: evaluations reused from another combination are included at their cost there. Other "
    "time is that outside evaluations: the solver's, or the ranking of the heads by a static "
    "method."
)


def page(comparison: Comparison) -> str:
    """The self-contained HTML page: a picture for each ratio, the tables, and costs."""
    done, combinations = len(comparison.results), len(comparison.combinations)
    body = ""
    if done < combinations:
        body += markup.notes([f"{done} of {combinations} combinations are finished."])
    body += markup.notes(comparison.missing)
    for suite in comparison.originals:
        cards = [_picture(comparison, suite, ratio) for ratio in comparison.ratios]
        body += markup.section(f"{suite} average", _about(comparison), markup.grid(cards))
    tables = "".join(markup.card(table.html()) for table in score_tables(comparison))
    body += markup.section(
        "Tables", "As in BOSCH, Tables 1 and 2. A ratio leads to its scores by task.", tables
    )
    body += tasks_section(comparison)
    costs = markup.card(_cost_table(comparison).html())
    body += markup.section("Calibration scores and costs", _COSTS, costs)
    header = (
        f"<h1>Methods compared: {escape(comparison.recipe)}</h1>"
        f"<p>Model: {escape(comparison.model)}</p>"
    )
    footer = "Written by BOSCH-pipeline. The page is self-contained and loads nothing."
    return markup.page(f"Methods compared: {comparison.recipe}", STYLE, header, body, footer)


def _about(comparison: Comparison) -> str:
    return _ABOUT + (_PAPER if comparison.paper else "")


def _picture(comparison: Comparison, suite: str, ratio: float) -> str:
    """Bars of the methods at one ratio, the lowest untrained score first; ranges over seeds."""
    bars = []
    kinds: list[tuple[Models, str]] = [("untrained", "untrained"), ("trained", "hybrid")]
    for models, css in kinds:
        for method in comparison.methods:
            values = comparison.values(method, ratio, models, suite)
            if values:
                label = label_of(method) + (", trained" if models == "trained" else "")
                mean = statistics.fmean(values)
                ends = min(values), max(values)
                bars.append(figures.ScoreBar(label, css, mean, *ends, "seeds from"))
    if not bars:
        return markup.absent(f"ρ = {ratio:g}: nothing is finished yet.")
    bars.sort(key=lambda bar: bar.average)
    original, name = comparison.originals[suite].average, f"{suite}-{ratio:g}".replace(".", "-")
    picture = figures.responsive(
        partial(figures.standing, bars, original, suite.capitalize()), name, figures.HALF
    )
    return markup.card(picture, f"ρ = {ratio:g}")


def csv_table(comparison: Comparison) -> str:
    """Every score of the original and of every combination by task and length, with intervals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("method", "swa_ratio", "seed", *(one.name for one in fields(TaskRow))))
    for row in next((result.original_tasks for result in comparison.results.values()), ()):
        writer.writerow((ORIGINAL, 0.0, "", *astuple(row)))
    for combination, result in comparison.results.items():
        head = (combination.method, combination.ratio, combination.seed)
        writer.writerows((*head, *astuple(row)) for row in result.tasks)
    return text.getvalue()


def markdown(comparison: Comparison) -> str:
    """The tables and what each combination cost, as Markdown."""
    done, combinations = len(comparison.results), len(comparison.combinations)
    blocks = [
        f"# Methods compared: {comparison.recipe}\n",
        f"Model: `{comparison.model}`. {_about(comparison)}\n",
    ]
    if done < combinations:
        blocks.append(f"{done} of {combinations} combinations are finished.\n")
    blocks += [f"{sentence}\n" for sentence in comparison.missing]
    blocks += [table.markdown() for table in score_tables(comparison)]
    blocks += [
        "## Calibration scores and costs\n",
        f"{_COSTS}\n",
        _cost_table(comparison).markdown_table(),
    ]
    if done == combinations:
        blocks.append("![Scores of every method at every ratio](compare.png)\n")
    return "\n".join(blocks)


def _cost_table(comparison: Comparison) -> Table:
    """Means over seeds: S(z), and the work of the search, reused evaluations included."""
    header = (
        "Method", "ρ", "S(z)", "log-likelihood", "evaluations", "full passes",
        "other time, seconds",
    )  # fmt: skip
    rows = [
        _cost_row(label_of(method), ratio, results)
        for method in comparison.methods
        for ratio in comparison.ratios
        if (results := comparison.results_of(method, ratio))
    ]
    return Table("Calibration scores and costs", header, (Group(rows),), text_columns=1)


def _cost_row(label: str, ratio: float, results: Sequence[Result]) -> list[str]:
    def mean(name: str) -> float:
        return statistics.fmean(result.costs.get(name, 0.0) for result in results)

    score = statistics.fmean(result.calibration_score for result in results)
    likelihood = statistics.fmean(result.calibration_log_likelihood for result in results)
    passes = mean("full_forward_equivalents") + mean("reused_full_forward_equivalents")
    return [
        label,
        f"{ratio:g}",
        f"{score:.3f}",
        f"{likelihood:.3f}",
        f"{mean('evaluations'):,.0f}",
        f"{passes:,.1f}",
        f"{mean('solver_seconds'):,.1f}",
    ]
