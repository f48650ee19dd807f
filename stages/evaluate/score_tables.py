"""The tables that commands print of an evaluation."""

from __future__ import annotations

from stages.evaluate.scores import ABOUT_MARKS, MeanScore, SelectedScores, SuiteScores, mark, power
from stages.formats import format_length, format_score
from stages.pages.tables import Table


def score_tables(scores: SelectedScores) -> list[Table]:
    """For each suite a row for each task and length, with 95 % intervals.

    Marks stand before what the samples do not show to differ from the original.
    """
    tables = []
    models = scores.checkpoints
    for suite in dict.fromkeys(name for suites in models.values() for name in suites):
        tables_of = {name: suites[suite] for name, suites in models.items() if suite in suites}
        rows = []
        places = [(task, at) for table in tables_of.values() for task in table.tasks
                  for at in table.tasks[task]]  # fmt: skip
        for task, length in dict.fromkeys(places):
            name = f"{task} at {format_length(length)}" if length else task
            cells = [table.tasks.get(task, {}).get(length) for table in tables_of.values()]
            rows.append([name, *(_cell(cell) for cell in cells)])
        for group in dict.fromkeys(name for table in tables_of.values() for name in table.groups):
            means = [table.groups.get(group) for table in tables_of.values()]
            most = max((mean for mean in means if mean is not None), key=lambda m: len(m.tasks))
            covers = f"{group} ({len(most.tasks)} of {most.of} tasks)"
            rows.append([covers, *(_cell(mean) for mean in means)])
        rows.append(["average", *(_cell(t, t.average) for t in tables_of.values())])
        compared = [table.against_original for table in tables_of.values()]
        seen = next((power(one) for one in compared if one is not None), "")
        title = f"{suite}, 95 % intervals; {ABOUT_MARKS}{seen}"
        tables.append(Table.of_rows(title, ["task", *tables_of], rows))
    return tables


def _cell(score: MeanScore | SuiteScores | None, value: float | None = None) -> str:
    """A score, or the `value` of a suite's average; – for a model that has none."""
    if score is None:
        return format_score(None)
    if isinstance(score, MeanScore):
        value = score.score
    interval = f"{format_score(score.low)}–{format_score(score.high)}"
    return f"{mark(score.against_original)}{format_score(value)} ({interval})"
