"""What a study ends with: numbers as JSON, tables as Markdown, pictures as PNG."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.analysis.bootstrap import Interval


@dataclass(frozen=True)
class Table:
    """A table with its heading; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Heading and table."""
        lines = [f"## {self.title}", "", _line(self.header), "|" + "---|" * len(self.header)]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


@dataclass(frozen=True)
class StudyResult:
    """Title, what was done (a few sentences), numbers, tables and pictures by name."""

    name: str
    title: str
    text: str
    data: dict[str, Any]
    tables: list[Table]
    pictures: dict[str, Any] = field(default_factory=dict)


def publish(result: StudyResult, folder: Path, command: str, docs: Path | None = None) -> None:
    """Write NAME.json, NAME.md and its pictures into `folder`; page and pictures to `docs` too."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"study": result.name, "command": command, **result.data}
    (folder / f"{result.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    files = [f"{result.name}.md"]
    images = []
    for name, figure in result.pictures.items():
        files.append(f"{result.name}-{name}.png")
        figure.savefig(folder / files[-1], dpi=110)
        images.append(f"![{name.replace('-', ' ')}]({files[-1]})\n")
    parts = [f"# {result.title}\n", result.text + "\n", f"    {command}\n", *images]
    parts += [table.markdown() for table in result.tables]
    (folder / files[0]).write_text("\n".join(parts))
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(folder / file, docs / file)


def shown(interval: Interval, digits: int = 3) -> str:
    """`0.812 [0.775, 0.849]`."""
    mean, low, high = (f"{value:.{digits}f}" for value in interval)
    return f"{mean} [{low}, {high}]"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
