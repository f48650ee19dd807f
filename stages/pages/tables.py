"""Tables of results for the terminal and HTML (pieces.html)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

_WIDEST = 100_000


class Cell(NamedTuple):
    """The text of a cell; a note below it on a page, elsewhere beside it; its link on a page."""

    text: str
    note: str = ""
    link: str = ""

    @property
    def line(self) -> str:
        return f"{self.text} {self.note}".strip()


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """A table with its title; its groups of rows are set apart by lines.

    On the terminal, columns after the first `text_columns` are right-aligned, as for numbers.
    """

    title: str
    header: Sequence[str]
    groups: Sequence[Sequence[Row]]
    text_columns: int = 0

    @property
    def lines(self) -> list[list[list[str]]]:
        """The text of each cell with its note, of each row, of each group."""
        return [[[as_cell(cell).line for cell in row] for row in group] for group in self.groups]

    @property
    def records(self) -> list[dict[str, str]]:
        """The texts of each row by the names of the columns."""
        rows = (row for group in self.lines for row in group)
        return [dict(zip(self.header, row, strict=False)) for row in rows]

    def print(self) -> None:
        """Print the table on the terminal, with a line between groups."""
        table = TerminalTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for number, name in enumerate(self.header):
            side: Any = "left" if number < self.text_columns else "right"
            table.add_column(Text(name), justify=side, no_wrap=True)
        for group in self.lines:
            table.add_section()
            for row in group:
                table.add_row(*map(Text, row))
        console = Console()
        if not console.is_terminal:  # cut off nothing in a log
            console = Console(width=_WIDEST)
        if self.title:  # separately: rich wraps a table's title at the table's width
            console.print(Text(self.title, style="table.title"))
        console.print(table)


def as_cell(content: str | Cell) -> Cell:
    return content if isinstance(content, Cell) else Cell(content)
