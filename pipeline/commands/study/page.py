"""The page of a study: numbers as JSON, tables as Markdown, plots as PNG."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.analysis.intervals import Estimate
from bosch.files import write_json, write_text
from pipeline.commands.plots import save
from pipeline.commands.tables import Table


@dataclass(frozen=True)
class StudyResult:
    """Title, what was done (a few sentences), numbers, tables and matplotlib figures by name."""

    name: str
    title: str
    text: str
    data: dict[str, Any]
    tables: list[Table]
    figures: dict[str, Any] = field(default_factory=dict)


def publish(result: StudyResult, folder: Path, command: str, docs: Path | None = None) -> Path:
    """Write NAME.json, NAME.md and its plots into `folder`; page and plots into `docs` too.

    Returns the page.
    """
    write_json(
        folder / f"{result.name}.json", {"study": result.name, "command": command} | result.data
    )
    page = folder / f"{result.name}.md"
    files = [page]
    images = []
    for name, figure in result.figures.items():
        files.append(folder / f"{result.name}-{name}.png")
        save(figure, files[-1], dpi=110)
        images.append(f"![{name.replace('-', ' ')}]({files[-1].name})\n")
    blocks = [f"# {result.title}\n", result.text + "\n", f"    {command}\n", *images]
    blocks += [table.markdown() for table in result.tables]
    write_text(page, "\n".join(blocks))
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, docs / file.name)
    return page


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """`0.812 [0.775, 0.849]`."""
    mean = f"{estimate.mean:.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return f"{mean} [too few]"
    return f"{mean} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
