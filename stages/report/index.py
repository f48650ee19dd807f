"""runs/index.html: a row for each run that has a report; every report rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.files import read_json, write_text
from bosch.window import Window, windows_text
from stages.formats import format_bytes, format_money, format_score, format_share
from stages.pages.page import render
from stages.pages.tables import Cell, Table
from stages.published import Manifest, Summary
from stages.report.stage import PAGE

INDEX = "index.html"
_TEMPLATE = "stages/report/index.html"
_HEADER = (
    "run", "verdict", "model", "method", "sliding", "window", "original", "untrained", "trained",
    "cache per token", "GPU hours", "cost", "date",
)  # fmt: skip


def write_index(root: Path) -> Path:
    """Write the page of all runs in `root` from their reports' summaries; returns its path."""
    summaries = sorted(root.glob(f"*/report/{Summary.FILE}"))
    rows = [_row(file.parent.parent.name, file.parent) for file in summaries]
    table = Table.of_rows("", _HEADER, rows)
    text = render(
        _TEMPLATE, has_charts=False, title="Runs", subtitle=f"{len(rows)} with a report", runs=table
    )
    write_text(root / INDEX, text)
    return root / INDEX


def _row(name: str, folder: Path) -> list[str]:
    link = Cell(name, target=f"{name}/report/{PAGE}")
    try:
        created = Manifest.read(folder).created or ""
        summary = read_json(folder / Summary.FILE)
        if not isinstance(summary, dict):
            raise RunError(f"{folder / Summary.FILE}: no JSON object")
        verdict = summary.get("headline") or summary["verdict"] or ""
        return [link, verdict, *_cells(summary), created[:16].replace("T", " ")]
    except (RunError, LookupError, TypeError, ValueError, AttributeError) as error:
        # The summary is damaged or of an older version; the other runs are shown.
        return [link, f"cannot be read: {error}", *[""] * (len(_HEADER) - 2)]


def _cells(summary: dict[str, Any]) -> list[str]:
    needle, cache = summary["needle"], summary["kv_cache_bytes_per_token"]
    model = Path(summary["model"])
    cached = f"{format_bytes(cache['before'])} → {format_bytes(cache['after'])}"
    hours = sum(summary["gpu_hours"].values())
    costs = (summary["cost"] or {}).items()
    cost = [Cell(format_money(amount, currency), value=amount) for currency, amount in costs]
    return [
        model.name if model.is_absolute() else summary["model"],
        summary["method"],
        format_share(summary["swa_ratio"]),
        windows_text([Window(n) for n in summary.get("window_sizes") or [summary["window_size"]]]),
        *(format_score(needle[name]) for name in ("original", "hybrid", "trained")),
        Cell(cached, value=cache["after"]),
        Cell(f"{hours:,.2f}", value=hours) if hours else "",
        cost[0] if cost else "",
    ]
