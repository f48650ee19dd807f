"""Tables of results for the terminal, Markdown, CSV and HTML (pieces.html)."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

_WIDEST = 100_000
_BEST, _SECOND = 1, 2
_MARKDOWN = {_BEST: "**{}**", _SECOND: "<u>{}</u>"}
_TERMINAL = {_BEST: "bold", _SECOND: "underline"}


@dataclass(eq=False, repr=False)
class Cell(str):
    """The text of a cell, and formatting that only some outputs use.

    `rank`: 1 is bold, 2 underlined, 0 neither; its meaning is up to the caller. `target`: the link
    of the text on a page. `more`: small texts below it, each with its link. `share`: strength of
    the tint, 0 to 1; None: no tint. `task`, `length`: values by which the page's filter selects the
    row (of its first cell) or the column (of its header). `value`: the number by which a page sorts
    the row; None: by the text.
    """

    text: InitVar[str]
    rank: int = 0
    target: str = ""
    more: Sequence[tuple[str, str]] = ()
    share: float | None = None
    task: str = ""
    length: str = ""
    value: float | None = None

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

    In Markdown and on the terminal, columns after the first `text_columns` hold numbers and are
    right-aligned; None: all hold texts. On a page, `name` is the table's id, and `note` is next to
    its title.
    """

    title: str
    header: Sequence[str]
    groups: Sequence[Group]
    text_columns: int | None = None
    name: str = ""
    note: str = ""

    @classmethod
    def of_rows(cls, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """A table without groups whose columns hold texts."""
        return cls(title, header, (Group(rows),))

    @property
    def rows(self) -> list[Sequence[str]]:
        return [row for group in self.groups for row in group.rows]

    def markdown(self) -> str:
        return f"## {self.title}\n\n" + self.markdown_table()

    def markdown_table(self) -> str:
        """The table without its heading."""
        rule = ["---:" if self._is_number(i) else "---" for i in range(len(self.header))]
        lines = [_line(self.header), "|" + "|".join(rule) + "|"]
        for group in self.groups:
            lines += [_line(row) for row in group.rows]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.rows])
        return text.getvalue()

    def print(self) -> None:
        """Print the table on the terminal, with a line between groups."""
        table = TerminalTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for number, name in enumerate(self.header):
            table.add_column(
                Text(name), justify="right" if self._is_number(number) else "left", no_wrap=True
            )
        for group in self.groups:
            table.add_section()
            for row in group.rows:
                table.add_row(
                    *(Text(cell, style=_TERMINAL.get(as_cell(cell).rank, "")) for cell in row)
                )
        console = Console()
        if not console.is_terminal:
            # Cut off nothing in a log; rich assumes 80 characters for a file.
            unbounded = console.options.update(max_width=_WIDEST)
            width = Measurement.get(console, unbounded, table).maximum
            console = Console(width=max(width, console.width))
        if self.title:  # separately: rich wraps a table's title at the table's width
            console.print(Text(self.title, style="table.title"))
        console.print(table)

    def _is_number(self, column: int) -> bool:
        return self.text_columns is not None and column >= self.text_columns


def as_cell(text: str) -> Cell:
    """A text as a cell without formatting."""
    return text if isinstance(text, Cell) else Cell(text)


def _line(cells: Sequence[str]) -> str:
    marked = (_MARKDOWN.get(as_cell(cell).rank, "{}").format(_escaped(cell)) for cell in cells)
    return "| " + " | ".join(marked) + " |"


def _escaped(text: str) -> str:
    """The text of a Markdown cell, escaped so that it does not end the cell or the row."""
    return text.replace("|", "\\|").replace("\n", " ")
