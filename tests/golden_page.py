"""What stands on a page, line by line, and the report's golden page.

    python -m tests.golden_page

writes the golden page anew; look at its diff.
"""

from __future__ import annotations

import tempfile
from html.parser import HTMLParser
from pathlib import Path

from stages.report import run as report
from tests import report_fixture

GOLDEN = Path(__file__).with_name("golden_report.txt")
_VOID = {"meta", "br", "hr", "img", "input", "link"}
_HIDDEN = {"script", "style", "svg", "head", "select"}
_LINES = {"h1", "h2", "h3", "h4", "p", "tr", "caption", "summary", "div", "figure", "footer"}


class Outline(HTMLParser):
    """Checks that tags balance, and collects texts in lines, tags, scripts and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.score_cells: dict[str, str] = {}
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """The page's lines, cells apart; what is closed at first has its heading alone."""
        return "\n".join(line for line in self._lines if line)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append((tag, dict(attrs)))
        if tag in _LINES:
            self._lines.append("")
        if tag == "figure" and not self._is_closed:
            self._lines.append(f"[{dict(attrs)['aria-label']}]")
        if tag in ("td", "th") and self._lines[-1]:
            self._lines[-1] += " | "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [name for name, _ in self.open]
        if names[-1:] == ["script"]:
            self.scripts.append((self.open[-1][1].get("type"), data))
        if "td" in names:
            link = next((a["href"] for name, a in reversed(self.open) if name == "a"), None)
            cell = self.open[names.index("td")][1]
            if link is not None:
                cell["target"] = link
            if cell.get("target"):
                self.score_cells[str(cell["target"])] = (
                    self.score_cells.get(str(cell["target"]), "") + data.strip()
                )
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inputs = report_fixture.publish(Path(folder))
        report.run(report_fixture.config(inputs), inputs, Path(folder) / "report")
        page = (Path(folder) / "report" / "index.html").read_text(encoding="utf-8")
    GOLDEN.write_text(outline(page).text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
