"""Text of a page, line by line: the golden reports.

    python -m tests.golden_page

writes the reports again; look at their diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from stages.report import page as report
from tests import report_fixture

# Published stages, and what their report contains.
REPORTS = {
    report_fixture.publish: Path(__file__).with_name("golden_report.txt"),
    report_fixture.publish_front: Path(__file__).with_name("golden_front_report.txt"),
}
_VOID = {"meta", "br", "hr", "img", "input", "link"}
_HIDDEN = {"script", "style", "svg", "head", "select"}
_LINES = {
    "h1", "h2", "h3", "h4", "p", "tr", "caption", "summary", "div", "figure", "footer",
    "li", "pre", "dt",
}  # fmt: skip


class Outline(HTMLParser):
    """Checks that tags balance, and collects lines of text and tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """The page's lines, with separated cells; of closed parts only the heading."""
        return "\n".join(line for line in self._lines if line)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append((tag, dict(attrs)))
        if tag in _LINES:
            self._lines.append("")
        if tag == "tbody":  # a line between groups of rows
            self._lines.append("=")
        if tag == "figure" and not self._is_closed:
            self._lines.append(f"[{dict(attrs)['aria-label']}]")
        if tag in ("td", "th", "dd") and self._lines[-1]:
            self._lines[-1] += " | "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [name for name, _ in self.open]
        if not _HIDDEN & set(names) and not self._is_closed and data.strip() and self._lines:
            self._lines[-1] += (" " if names[-1] == "small" else "") + " ".join(data.split())

    @property
    def _is_closed(self) -> bool:
        names = [name for name, _ in self.open]
        return "details" in names and "summary" not in names


def outline(page: str) -> Outline:
    """The outline of a page whose tags balance."""
    parsed = Outline()
    parsed.feed(page)
    assert parsed.open == []
    return parsed


def _text(value: Any) -> str:
    """JSON with six digits of each number."""
    rounded = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))
    return json.dumps(rounded, ensure_ascii=False).replace('"', "")


def golden_report(publish: Callable[[Path], dict[str, Path]], folder: Path) -> str:
    """The golden text of a report: page, summary.json and terminal output."""
    inputs, printed = publish(folder), io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.dict(os.environ, COLUMNS="80"):
        summary = report.run(report_fixture.config(inputs), inputs, folder / "report")
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    lines = [f"{name}: {_text(value)}" for name, value in summary.items()]
    lines += ["", *map(str.rstrip, printed.getvalue().splitlines())]
    return "\n".join([outline(page).text, "", *lines, ""])


def main() -> None:
    for publish, file in REPORTS.items():
        with tempfile.TemporaryDirectory() as folder:
            file.write_text(golden_report(publish, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
