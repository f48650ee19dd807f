"""Answers behind the scores: for each table cell some of its samples, the wrong ones first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from stages.formats import format_length, format_score
from stages.report import markup
from stages.report.results import SHOWN_SAMPLES, Place, Results, label_of

_LONGEST = 400


def anchor(checkpoint: str, suite: str, task: str, length: int) -> str:
    """The id of a cell's samples on the page."""
    return "-".join(("samples", checkpoint, suite, task, str(length)))


def predictions_section(results: Results) -> str:
    """All collected samples, closed until a score leads to them; empty without any."""
    if not results.predictions:
        return ""
    lead = (
        f"Of every score up to {SHOWN_SAMPLES} samples, the lowest first, each with the end of its "
        "prompt. samples.jsonl beside scores.json holds all of them."
    )
    models: dict[str, str] = {}
    for place, records in results.predictions.items():
        models[place[0]] = models.get(place[0], "") + _cell(place, records)
    inner = "".join(markup.details(label_of(name), cells) for name, cells in models.items())
    return markup.section("Predictions", lead, inner)


def _cell(place: Place, records: list[Mapping[str, Any]]) -> str:
    _, _, task, length = place
    name = f"{task} at {format_length(length)}" if length else task
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
        f'<h4 id="{escape(anchor(*place))}">{escape(name)}</h4><div class="samples">{table}</div>'
    )
