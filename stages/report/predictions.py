"""Answers behind the scores: the samples that the report shows for each score."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from data_prep.tasks.samples import TAIL_CHARACTERS
from stages.formats import format_length, format_score
from stages.report.results import Model, ScoreKey

_MAX_CHARACTERS = 400  # shown of an output


class Sample(NamedTuple):
    """One answer; `score` has its number."""

    score: str
    prompt: str
    expected: str
    output: str


class ScoreSamples(NamedTuple):
    """Samples of a task at a length; `anchor` is the id on the page."""

    anchor: str
    label: str
    task: str
    length: str
    samples: list[Sample]


class ModelSamples(NamedTuple):
    """Samples of all scores of a model; `anchor` is the id on the page."""

    anchor: str
    label: str
    cells: list[ScoreSamples]


def anchor(model: Model, *place: str | int) -> str:
    """The id on the page of a model's samples or, with suite, task and length, of a score's."""
    name = f"{model.name}@{model.branch}" if model.branch else model.name
    return re.sub(r"[^\w.-]+", "_", "-".join(("samples", name, *map(str, place))))


def samples_by_model(
    predictions: Mapping[ScoreKey, Iterable[Mapping[str, Any]]],
) -> list[ModelSamples]:
    """The samples by model and score."""
    models: dict[Model, ModelSamples] = {}
    for place, records in predictions.items():
        found, suite, task, length = place
        model = models.setdefault(found, ModelSamples(anchor(found), found.label, []))
        tokens = format_length(length) if length else ""
        label = f"{task} at {tokens}" if tokens else task
        samples = list(map(_sample, records))
        model.cells.append(
            ScoreSamples(anchor(found, suite, task, length), label, task, tokens, samples)
        )
    return list(models.values())


def _sample(record: Mapping[str, Any]) -> Sample:
    end = str(record.get("question", ""))
    return Sample(
        f"{record['index']}: {format_score(100 * record['score'])}",
        f"…{end}" if len(end) >= TAIL_CHARACTERS else end,  # the prompt is longer
        ", ".join(map(str, record.get("answers", ()))),
        str(record.get("output", ""))[:_MAX_CHARACTERS],
    )
