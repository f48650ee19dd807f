"""Tables of results for the terminal and HTML (pieces.html)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

_WIDEST = 100_000


@dataclass(eq=False, repr=False)
class Cell(str):
    """The text of a cell, and formatting that only some outputs use.

    `target`: the link of the text on a page. `more`: small texts below it, elsewhere beside it.
    """

    text: InitVar[str]
    target: str = ""
    more: Sequence[str] = ()

    def __new__(cls, text: str, *_: object, **__: object) -> Self:
        return super().__new__(cls, text)


@dataclass(frozen=True)
class Group:
    """Rows; `is_total`: set apart, as they summarise the groups above."""

    rows: Sequence[Sequence[str]]
    is_total: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its title; cells are texts, or `Cell`s.

    On the terminal, columns after the first `text_columns` are right-aligned, as for numbers.
    """

    title: str
    header: Sequence[str]
    groups: Sequence[Group]
    text_columns: int = 0

    @property
    def records(self) -> list[dict[str, str]]:
        """The texts of each row by the names of the columns."""
        return [
            {
                name: " ".join([cell, *as_cell(cell).more])
                for name, cell in zip(self.header, row, strict=False)
            }
            for group in self.groups
            for row in group.rows
        ]

    def print(self) -> None:
        """Print the table on the terminal, with a line between groups."""
        table = TerminalTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for number, name in enumerate(self.header):
            side: Any = "left" if number < self.text_columns else "right"
            table.add_column(Text(name), justify=side, no_wrap=True)
        for group in self.groups:
            table.add_section()
            for row in group.rows:
                table.add_row(*(Text(" ".join([cell, *as_cell(cell).more])) for cell in row))
        console = Console()
        if not console.is_terminal:  # cut off nothing in a log
            console = Console(width=_WIDEST)
        if self.title:  # separately: rich wraps a table's title at the table's width
            console.print(Text(self.title, style="table.title"))
        console.print(table)


def as_cell(text: str) -> Cell:
    """A text as a cell without formatting."""
    return text if isinstance(text, Cell) else Cell(text)
