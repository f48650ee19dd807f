"""Every score with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

from bosch.search.methods import METHODS
from stages.evaluate.scores import (
    ABOUT_MARKS,
    HYBRID,
    ORIGINAL,
    MeanScore,
    SuiteScores,
    mark,
    named_window,
)
from stages.formats import format_length, format_score, format_share
from stages.report import figures, markup
from stages.report.predictions import anchor
from stages.report.results import NeedleScores, Results, label_of

HARNESS = "harness"


def standing_section(results: Results) -> str:
    """The search's hybrid beside its rivals and the original, in one picture; empty without scores.

    All hybrids have the same number of sliding heads and the same window.
    """
    label = METHODS[results.search.mask.method].label
    hybrid, trained = results.checkpoint(HYBRID), results.trained
    models = [(one.label, "rival", one.suite) for one in results.rivals]
    if hybrid is not None:
        models.append((f"{label}, untrained", "untrained", hybrid.suite))
    if trained is not None:
        models.append((f"{label}, trained", "hybrid", trained.suite))
    if not models:
        return ""
    bars = [_bar(name, css, suite) for name, css, suite in models]
    original = results.checkpoint(ORIGINAL)
    average = original.average if original is not None else None
    picture = figures.responsive(partial(figures.standing, bars, average, "Needle"), "standing")
    count = models[0][2].samples
    share = format_share(results.search.sliding / results.search.total)
    note = (
        f"The same {count:,} samples, {share} of the KV heads sliding with a window of "
        f"{results.search.window_sizes}; thin lines are 95 % intervals."
    )
    return markup.card(f'{picture}<p class="lead">{escape(note)}</p>')


def _bar(label: str, css: str, suite: SuiteScores) -> figures.ScoreBar:
    return figures.ScoreBar(label, css, *_interval(suite))


def scores_section(results: Results, why_none: str) -> str:
    """A table for each model: tasks by lengths, with 95 % intervals."""
    heading = "Scores by task and length"
    lead = f"RULER by context length, in points of 100, each with its 95 % interval. {ABOUT_MARKS}."
    if results.needle is None:
        return markup.section(heading, lead, markup.absent(why_none))
    models = [*results.needle, *results.rivals]
    cards = [markup.card(score_table(scores)) for scores in models]
    return markup.section(heading, lead, _filter_bar(results) + markup.grid(cards))


def windows_section(results: Results) -> str:
    """The masks at other windows: a curve for each, and all scores; empty without them."""
    hybrid = results.checkpoint(HYBRID)
    if not results.windows or hybrid is None:
        return ""
    searched = results.search.mask
    curves = {None: {searched.window_size: hybrid.suite}} | {
        rival.name: {searched.window_size: rival.suite} for rival in results.rivals
    }
    for model in results.windows:
        method, size = named_window(model.name) or (None, 0)
        curves[method][size] = model.suite
    lines = [
        figures.WindowCurve(
            METHODS[method or searched.method].label,
            "rival" if method else "untrained",
            [(size, *_interval(suite)) for size, suite in sorted(by_size.items())],
        )
        for method, by_size in curves.items()
    ]
    original = results.checkpoint(ORIGINAL)
    average = original.average if original is not None else None
    picture = figures.responsive(partial(figures.window_curves, lines, average), "windows")
    lead = (
        f"The masks found at W = {searched.window_size:,} at other windows, untrained (BOSCH C.3): "
        "needle averages with 95 % intervals."
    )
    tables = markup.grid(markup.card(score_table(scores)) for scores in results.windows)
    inner = markup.card(picture) + markup.details("Scores by task and length", tables)
    return markup.section("Window sizes", lead, inner)


def _interval(suite: SuiteScores) -> tuple[float, float, float]:
    """The average and the ends of its interval."""
    low = suite.average if suite.low is None else suite.low
    high = suite.average if suite.high is None else suite.high
    return suite.average, low, high


def _filter_bar(results: Results) -> str:
    """Menus of all tasks and lengths that have a score."""
    suites = results.scores.checkpoints.values() if results.scores is not None else ()
    tables = [table.tasks for tables in suites for table in tables.values()]
    lengths = {length for tasks in tables for by in tasks.values() for length in by if length}
    return markup.filter_bar(
        {
            "task": list(dict.fromkeys(task for tasks in tables for task in tasks)),
            "length": [format_length(length) for length in sorted(lengths)],
        }
    )


def score_table(scores: NeedleScores) -> str:
    """Tasks by lengths of one checkpoint, each cell tinted by its score."""
    suite = scores.suite
    lengths = sorted({length for by in suite.tasks.values() for length in by})
    texts = [format_length(length) for length in lengths]
    head = "".join(f'<th scope="col"{markup.filtered(length=at)}>{at}</th>' for at in texts)
    rows = [
        _score_row(
            task,
            [by.get(at) for at in lengths],
            links=[anchor(scores.name, "needle", task, at) for at in lengths],
            lengths=texts,
            is_task=True,
        )
        for task, by in suite.tasks.items()
    ]
    if suite.by_length:
        means = [suite.by_length.get(length) for length in lengths]
        links = [anchor(scores.name)] * len(lengths)
        rows.append(_score_row("all tasks", means, "total", links, texts))
    caption = f"{escape(scores.label)} <span>average {format_score(scores.average)}</span>"
    return (
        f'<div class="scroll"><table><caption>{caption}</caption><thead><tr>'
        f'<th scope="col">task</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _score_row(
    name: str,
    scores: Sequence[MeanScore | None],
    css: str = "",
    links: Sequence[str] = (),
    lengths: Sequence[str] = (),
    *,
    is_task: bool = False,
) -> str:
    """A row of scores, each of which leads to its samples at `links`.

    The page's filter hides the row of a task, and cells of `lengths`.
    """
    cells = "".join(map(_cell, scores, links, lengths or [""] * len(scores)))
    shown = markup.filtered(task=name) if is_task else ""
    return f'<tr class="{css}"{shown}><th scope="row">{escape(name)}</th>{cells}</tr>'


def _cell(score: MeanScore | None, target: str, length: str) -> str:
    shown = markup.filtered(length=length)
    if score is None:
        return f'<td class="score"{shown} style="--share:0">{format_score(None)}</td>'
    interval = f"{format_score(score.low)}–{format_score(score.high)}"
    value = markup.link(f"#{target}", f"{mark(score.against_original)}{format_score(score.score)}")
    return (
        f'<td class="score"{shown} style="--share:{score.score / 100:.3f}">{value}'
        f"<small>{interval}</small></td>"
    )


def harness_section(results: Results) -> str:
    """Tasks of lm-evaluation-harness and LongBench's averages by model; empty without them."""
    scores = results.scores
    suites = {
        name: tables[HARNESS]
        for name, tables in (scores.checkpoints if scores is not None else {}).items()
        if HARNESS in tables
    }
    missing = scores.missing.get(HARNESS, {}) if scores is not None else {}
    if not suites and not missing:
        return ""
    lead = "Tasks of lm-evaluation-harness, in points of 100, each with its 95 % interval."
    inner = markup.notes(f"{task} has no score: {reason}" for task, reason in missing.items())
    if suites:
        head = "".join(f'<th scope="col">{escape(label_of(name))}</th>' for name in suites)
        rows = [
            _score_row(
                task,
                [suite.tasks.get(task, {}).get(0) for suite in suites.values()],
                links=[anchor(name, "harness", task, 0) for name in suites],
                is_task=True,
            )
            for task in dict.fromkeys(task for suite in suites.values() for task in suite.tasks)
        ]
        links = [anchor(name) for name in suites]
        for name in dict.fromkeys(name for suite in suites.values() for name in suite.groups):
            means = [suite.groups.get(name) for suite in suites.values()]
            most = max((mean for mean in means if mean is not None), key=lambda m: len(m.tasks))
            label = f"{name} ({len(most.tasks)} of {most.of} tasks)"
            rows.append(_score_row(label, means, "total", links))
        table = (
            f'<div class="scroll"><table><thead><tr><th scope="col">task</th>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
        inner += markup.card(table)
    return markup.section("Other tasks", lead, inner)


def positions_section(results: Results) -> str:
    """Loss by position of the original, the untrained hybrid and the last checkpoint."""
    tables = results.scores.positions if results.scores is not None else {}
    if not tables:
        return ""
    last = results.scores.last_trained if results.scores is not None else None
    curves = [
        (name, css, tables[name])
        for name, css in ((ORIGINAL, "original"), (HYBRID, "untrained"), (last, "hybrid"))
        if name in tables
    ]
    count = curves[0][2].documents
    lead = (
        f"Cross-entropy by position in {count:,} held-out documents, each bin with its 95 % "
        "interval over documents (Student's; of one document there is none): where a model stops "
        "using what is far, its curve rises."
    )
    keys = [("stroke", css, label_of(str(name)).lower()) for name, css, _ in curves]
    losses = [(css, table.edges, table.loss) for _, css, table in curves]
    picture = figures.responsive(
        partial(figures.loss_by_position, losses, "Loss (nats per token)"), "positions"
    )
    inner = markup.card(markup.legend(keys) + picture)
    more = [(css, table.edges, table.difference) for _, css, table in curves if table.difference]
    if more:
        picture = figures.responsive(
            partial(figures.loss_by_position, more, "Difference (nats per token)"),
            "positions-difference",
        )
        inner += markup.card(
            markup.legend(keys[1:]) + picture, "Less the original's loss, on the same documents"
        )
    return markup.section("Loss by position", lead, inner)
