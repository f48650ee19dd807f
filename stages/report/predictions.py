"""Answers behind the scores: for each table cell some of its samples, the wrong ones first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from stages.formats import format_length, format_score
from stages.report import markup
from stages.report.results import SHOWN_SAMPLES, Place, label_of

_LONGEST = 400


def anchor(*place: str | int) -> str:
    """The id of a model's samples on the page, or with suite, task and length of a cell's."""
    return "-".join(("samples", *map(str, place)))


def predictions_section(predictions: Mapping[Place, list[Mapping[str, Any]]]) -> str:
    """All collected samples, closed until a score leads to them; empty without any."""
    if not predictions:
        return ""
    lead = (
        f"Of every score up to {SHOWN_SAMPLES} samples, the lowest first, each with the end of its "
        "prompt. samples.jsonl beside scores.json holds all of them."
    )
    models: dict[str, str] = {}
    for place, records in predictions.items():
        models[place[0]] = models.get(place[0], "") + _cell(place, records)
    inner = "".join(
        markup.details(label_of(name), cells, anchor(name)) for name, cells in models.items()
    )
    return markup.section("Predictions", lead, inner)


def _cell(place: Place, records: list[Mapping[str, Any]]) -> str:
    _, _, task, length = place
    at = format_length(length) if length else ""
    name = f"{task} at {at}" if at else task
    rows = [
        (
            f"{record['index']}: {format_score(100 * record['score'])}",
            f"…{str(record.get('question', ''))[-_LONGEST:]}",
            ", ".join(map(str, record.get("answers", ()))),
            str(record.get("output", ""))[:_LONGEST],
        )
        for record in records
    ]
    table = markup.table("", ("sample: score", "prompt", "expected", "output"), rows)
    return (
        f'<div class="samples"{markup.filtered(task, at)}><h4 id="{escape(anchor(*place))}">'
        f"{escape(name)}</h4>{table}</div>"
    )
