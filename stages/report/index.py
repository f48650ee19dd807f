"""runs/index.html: the table of models of each run that has a report; every report rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bosch.files import read_json, write_text
from stages.pages.page import render
from stages.pages.tables import Cell, Row, Table
from stages.published import Summary
from stages.report.stage import PAGE


def write_index(root: Path) -> None:
    """Write the page of all runs in `root` from their reports' summaries."""
    runs = {
        file.parent.parent.name: read_json(file)
        for file in sorted(root.glob(f"*/report/{Summary.FILE}"))
    }
    records = {name: _records(name, summary) for name, summary in runs.items()}
    header = dict.fromkeys(key for rows in records.values() for row in rows for key in row)
    groups: list[list[Row]] = [
        [[row.get(key, "") for key in header] for row in rows] for rows in records.values()
    ]
    text = render(
        "stages/report/index.html", title="Runs", subtitle=f"{len(runs)} with a report",
        runs=Table("", list(header), groups),
    )  # fmt: skip
    write_text(root / "index.html", text)


def _records(name: str, summary: Any) -> list[dict[str, Any]]:
    link = Cell(name, link=f"{name}/report/{PAGE}")
    try:
        return [{"run": link, **row} for row in summary["table"]]
    except (LookupError, TypeError):
        return [{"run": link, "model": "its summary cannot be read"}]
