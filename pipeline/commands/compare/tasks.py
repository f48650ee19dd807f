"""A comparison's scores by task and length, and pages with the predictions behind them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from bosch.files import write_text
from pipeline.commands.compare.comparison import (
    Combination,
    Comparison,
    Models,
    TaskRow,
    label_of,
)
from pipeline.commands.tables import best, marked_up, second_best
from stages.evaluate.scores import HYBRID, ORIGINAL, read_samples
from stages.formats import format_length, format_score
from stages.report import markup
from stages.report.charts import STYLE
from stages.report.predictions import anchor, predictions_section
from stages.report.results import collect_predictions
from stages.train.stage import checkpoint_name

_LEAD = (
    "In points of 100, with 95 % intervals, or where there are several seeds with the score of "
    "each. A score leads to some of its predictions. In each row the highest is bold, the second "
    "underlined, untested."
)


def write_predictions(comparison: Comparison, combination: Combination) -> None:
    """The page with the predictions of a finished combination, once for each evaluation."""
    path = comparison.folder / _predictions_file(comparison, combination)
    if path.exists():
        return
    for old in path.parent.glob("predictions-*.html"):
        old.unlink()
    stages = [path.parent / name for name in ("original", "evaluate")]
    predictions = collect_predictions(one for stage in stages for one in read_samples(stage))
    title = f"{comparison.recipe}: {combination}"
    header = f"<h1>{escape(title)}</h1>"
    footer = "Written by BOSCH-pipeline. The page is self-contained and loads nothing."
    body = predictions_section(predictions)
    write_text(path, markup.page(title, STYLE, header, body, footer))


def _predictions_file(comparison: Comparison, combination: Combination) -> str:
    """Path from the comparison's folder; the key names the evaluation that it shows."""
    key = comparison.results[combination].keys["evaluate"]
    return f"{combination.folder}/predictions-{key[:12]}.html"


def tasks_section(comparison: Comparison) -> str:
    """A table for each ratio, tasks by methods, and menus to show one task or length."""
    results = comparison.results.values()
    rows = [row for result in results for row in (*result.original_tasks, *result.tasks)]
    if not rows:
        return ""
    bar = markup.filter_bar(
        {
            "task": list(dict.fromkeys(row.task for row in rows)),
            "length": [
                format_length(at) for at in sorted({row.length for row in rows if row.length})
            ],
        }
    )
    cards = "".join(
        markup.card(table) for ratio in comparison.ratios for table in _tables(comparison, ratio)
    )
    return markup.section("Scores by task and length", _LEAD, bar + cards)


def table_id(ratio: float, models: Models) -> str:
    """Where on the page the ratio's scores by task are."""
    return f"tasks-{ratio:g}-{models}"


def task_places(
    comparison: Comparison, ratio: float, models: Models
) -> list[tuple[Models, str, str, int]]:
    """The tasks at their lengths that some method has a score of."""
    return list(
        dict.fromkeys(
            row.place
            for method in comparison.methods
            for result in comparison.results_of(method, ratio)
            for row in result.tasks
            if row.models == models
        )
    )


def _tables(comparison: Comparison, ratio: float) -> Iterator[str]:
    """The ratio's table of the untrained hybrids and, where there are some, of the trained."""
    methods = [method for method in comparison.methods if comparison.results_of(method, ratio)]
    head = "".join(f'<th scope="col">{escape(label_of(method))}</th>' for method in methods)
    kinds: tuple[Models, ...] = ("untrained", "trained")
    for models in kinds:
        rows = [
            _row(comparison, methods, ratio, place)
            for place in task_places(comparison, ratio, models)
        ]
        if rows:
            yield (
                f'<div class="scroll" id="{table_id(ratio, models)}"><table>'
                f"<caption>ρ = {ratio:g}, {models}</caption><thead><tr>"
                f'<th scope="col">task</th><th scope="col">Original</th>{head}</tr></thead>'
                f"<tbody>{''.join(rows)}</tbody></table></div>"
            )


def _row(
    comparison: Comparison,
    methods: Sequence[str],
    ratio: float,
    place: tuple[Models, str, str, int],
) -> str:
    task, length = place[2:]
    at = format_length(length) if length else ""
    first, result = next(iter(comparison.results.items()))
    originals = [
        (first, row) for row in result.original_tasks if row.place == ("original", *place[1:])
    ]
    scores = {method: comparison.task_rows(method, ratio, place) for method in methods}
    texts = marked({method: [row.score for _, row in rows] for method, rows in scores.items()})
    cells = [_cell(comparison, originals, "".join(format_score(r.score) for _, r in originals))]
    cells += [_cell(comparison, rows, texts[method]) for method, rows in scores.items()]
    name = f"{task} at {at}" if at else task
    return (
        f'<tr{markup.filtered(task, at)}><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>'
    )


def _cell(comparison: Comparison, rows: Sequence[tuple[Combination, TaskRow]], text: str) -> str:
    """A mean over seeds; it, or where there are several the score of each, leads to predictions."""
    if not rows:
        return f'<td class="score" style="--share:0">{format_score(None)}</td>'
    share = statistics.fmean(row.score for _, row in rows) / 100
    targets = [_target(comparison, *one) for one in rows]
    if len(rows) == 1:
        [(_, row)] = rows
        value = f'<a href="{escape(targets[0])}">{marked_up(text)}</a>'
        more = escape(f"{format_score(row.low)}–{format_score(row.high)}")
    else:
        value = marked_up(text)
        more = ", ".join(
            markup.link(target, format_score(row.score))
            for target, (_, row) in zip(targets, rows, strict=True)
        )
    return f'<td class="score" style="--share:{share:.3f}">{value}<small>{more}</small></td>'


def _target(comparison: Comparison, combination: Combination, row: TaskRow) -> str:
    """Where the predictions of a score are, from the comparison's folder."""
    names = {"original": ORIGINAL, "untrained": HYBRID}
    tokens = comparison.results[combination].trained_tokens or 0
    name = names.get(row.models) or checkpoint_name(tokens)
    file = _predictions_file(comparison, combination)
    return f"{file}#{anchor(name, row.suite, row.task, row.length)}"


def marked(values: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Texts of a column, the best and second best marked; equal scores share a place."""
    means = {method: round(statistics.fmean(v), 1) for method, v in values.items() if v}
    places = sorted(set(means.values()), reverse=True) if len(means) > 1 else []
    texts = {method: _mean_text(v) for method, v in values.items()}
    for mark, place in zip((best, second_best), places, strict=False):
        texts |= {m: mark(texts[m]) for m, mean in means.items() if mean == place}
    return texts


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean
