"""One table of results, drawn as Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from stages.report.markup import link

_WIDEST = 100_000
# Beginning and end of a marked text in Markdown, and its style on the terminal.
_MARKS = {("**", "**"): "bold", ("<u>", "</u>"): "underline"}


def best(text: str) -> str:
    """A cell that is the best of its column."""
    return f"**{text}**"


def second_best(text: str) -> str:
    """A cell that is the second best of its column."""
    return f"<u>{text}</u>"


@dataclass(frozen=True)
class Group:
    """Rows that belong together, with a heading above them where it has one."""

    rows: Sequence[Sequence[str]]
    heading: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its title; cells are texts, which `best` and `second_best` may have marked.

    Columns after the first `text_columns` hold numbers and are aligned right; None: no column.
    `targets` names places on a page that columns lead to.
    """

    title: str
    header: Sequence[str]
    groups: Sequence[Group]
    text_columns: int | None = None
    targets: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """A table without groups whose columns hold texts."""
        return cls(title, header, (Group(rows),))

    def markdown(self) -> str:
        """Heading and table."""
        return f"## {self.title}\n\n" + self.markdown_table()

    def markdown_table(self) -> str:
        """The table without its heading."""
        rule = ["---:" if self._is_number(i) else "---" for i in range(len(self.header))]
        lines = [_line(self.header), "|" + "|".join(rule) + "|"]
        for group in self.groups:
            if group.heading:
                lines.append(f"| *{group.heading}* |" + " |" * (len(self.header) - 1))
            lines += [_line(row) for row in group.rows]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """The table as markup; what `best` and `second_best` marked is bold and underlined."""
        names = [link(self.targets.get(name, ""), name) for name in self.header]
        head = "".join(f'<th scope="col">{name}</th>' for name in names)
        rows = []
        for group in self.groups:
            if group.heading:
                width = len(self.header)
                rows.append(
                    f'<tr class="total"><th scope="row" colspan="{width}">'
                    f"{escape(group.heading)}</th></tr>"
                )
            for first, *rest in group.rows:
                cells = "".join(f"<td>{marked_up(cell)}</td>" for cell in rest)
                rows.append(f'<tr><th scope="row">{marked_up(first)}</th>{cells}</tr>')
        return (
            f'<div class="scroll"><table><caption>{escape(self.title)}</caption><thead><tr>{head}'
            f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )

    def print(self) -> None:
        """Draw the table on the terminal, with a line between groups."""
        table = TerminalTable(
            title=self.title or None, title_justify="left", box=SIMPLE_HEAD, show_edge=False,
            pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for number, name in enumerate(self.header):
            table.add_column(
                name, justify="right" if self._is_number(number) else "left", no_wrap=True
            )
        for group in self.groups:
            table.add_section()
            if group.heading:
                table.add_row(Text(group.heading, style="italic dim"))
            for row in group.rows:
                table.add_row(*map(_styled, row))
        console = Console()
        if not console.is_terminal:
            # In a log nothing is cut off; rich takes a file for 80 characters wide.
            unbounded = console.options.update(max_width=_WIDEST)
            width = Measurement.get(console, unbounded, table).maximum
            console = Console(width=max(width, console.width))
        console.print(table)

    def _is_number(self, column: int) -> bool:
        return self.text_columns is not None and column >= self.text_columns


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def marked_up(text: str) -> str:
    """A cell's text as markup."""
    for (beginning, end), tag in zip(_MARKS, ("strong", "u"), strict=True):
        if text.startswith(beginning) and text.endswith(end):
            inner = text.removeprefix(beginning).removesuffix(end)
            return f"<{tag}>{escape(inner)}</{tag}>"
    return escape(text)


def _styled(text: str) -> Text:
    for (beginning, end), style in _MARKS.items():
        if text.startswith(beginning) and text.endswith(end):
            return Text(text.removeprefix(beginning).removesuffix(end), style=style)
    return Text(text)
