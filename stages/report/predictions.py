"""Answers behind the scores: the samples that the report shows for each score."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from data_prep.tasks.samples import TAIL_CHARACTERS
from stages.formats import format_length, format_score
from stages.pages.tables import Table
from stages.report.results import ScoreKey, label_of

_MAX_CHARACTERS = 400  # shown of an output


class ScoreSamples(NamedTuple):
    """Samples of a task at a length; `anchor` is the id on the page."""

    anchor: str
    label: str
    task: str
    length: str
    table: Table


class ModelSamples(NamedTuple):
    """Samples of all scores of a model; `anchor` is the id on the page."""

    anchor: str
    label: str
    cells: list[ScoreSamples]


def anchor(*place: str | int) -> str:
    """The id on the page of a model's samples or, with suite, task and length, of a score's."""
    return re.sub(r"[^\w.-]+", "_", "-".join(("samples", *map(str, place))))


def samples_by_model(
    predictions: Mapping[ScoreKey, Iterable[Mapping[str, Any]]],
) -> list[ModelSamples]:
    """The samples by model and score, for the macro `predictions`."""
    models: dict[str, ModelSamples] = {}
    for place, records in predictions.items():
        name, _, task, length = place
        model = models.setdefault(name, ModelSamples(anchor(name), label_of(name), []))
        tokens = format_length(length) if length else ""
        label = f"{task} at {tokens}" if tokens else task
        rows = []
        for record in records:
            score = f"{record['index']}: {format_score(100 * record['score'])}"
            end = str(record.get("question", ""))
            if len(end) >= TAIL_CHARACTERS:  # the prompt is longer
                end = f"…{end}"
            answers = ", ".join(map(str, record.get("answers", ())))
            rows.append((score, end, answers, str(record.get("output", ""))[:_MAX_CHARACTERS]))
        table = Table.of_rows("", ("sample: score", "prompt", "expected", "output"), rows)
        model.cells.append(ScoreSamples(anchor(*place), label, task, tokens, table))
    return list(models.values())
