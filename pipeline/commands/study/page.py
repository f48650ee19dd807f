"""The pages of a study: numbers as JSON and CSV, Markdown with plots as PNG, and HTML."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.files import write_json, write_text
from stages.pages.charts import Picture, save_panels
from stages.pages.page import render
from stages.pages.tables import Table


@dataclass(frozen=True)
class StudyResult:
    """Texts, numbers, tables and figures' panels of a study; `records` are lines of NAME.csv."""

    name: str
    title: str
    text: str
    data: dict[str, Any]
    tables: list[Table]
    figures: dict[str, list[Picture]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def publish(result: StudyResult, folder: Path, command: str, docs: Path | None = None) -> Path:
    """Write NAME.json, .html, .md, PNGs and CSV, the last three to `docs` too; returns the .md."""
    write_json(
        folder / f"{result.name}.json", {"study": result.name, "command": command} | result.data
    )
    page = folder / f"{result.name}.md"
    files = [page]
    if result.records:
        files.append(folder / f"{result.name}.csv")
        rows = [record.values() for record in result.records]
        cells = [["" if value is None else str(value) for value in row] for row in rows]
        write_text(files[-1], Table.of_rows("", list(result.records[0]), cells).csv())
    images = []
    for name, pictures in result.figures.items():
        files.append(folder / f"{result.name}-{name}.png")
        save_panels(pictures, files[-1], columns=max(2, len(pictures) // 2))
        images.append(f"![{name.replace('-', ' ')}]({files[-1].name})\n")
    blocks = [f"# {result.title}\n", result.text + "\n", f"    {command}\n", *images]
    blocks += [table.markdown() for table in result.tables]
    write_text(page, "\n".join(blocks))
    html = render(
        "stages/pages/results.html",
        title=result.title,
        subtitle="",
        text=result.text.replace("`", ""),  # Markdown's code marks
        command=command,
        figures=list(result.figures.values()),
        tables=result.tables,
    )
    write_text(folder / f"{result.name}.html", html)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, docs / file.name)
    return page
