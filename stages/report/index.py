"""runs/index.html: a row for each run that has a report; every report rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.files import read_json, write_text
from stages.evaluate.scores import HYBRID, ORIGINAL
from stages.evaluate.suites import suite_title
from stages.formats import format_length, format_money, format_score, format_share, interval, signed
from stages.pages.page import render
from stages.pages.tables import Cell, Table
from stages.published import Manifest, Summary
from stages.report.stage import PAGE

INDEX = "index.html"
_TEMPLATE = "stages/report/index.html"
_HEADER = (
    "run", "verdict", "points against original", "original", "untrained", "best",
    "cache in generate", "in vLLM", "GPU hours", "cost", "model", "method", "date",
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
        return [link, *_cells(summary), created[:16].replace("T", " ")]
    except (RunError, LookupError, TypeError, ValueError, AttributeError) as error:
        # The summary is damaged or of an older version; the other runs are shown.
        return [link, f"cannot be read: {error}", *[""] * (len(_HEADER) - 2)]


def _cells(summary: dict[str, Any]) -> list[str]:
    decision, hours = summary["decision"], sum(summary["gpu_hours"].values())
    verdict, change, best = ["no scores", "", HYBRID]
    if decision is not None:
        verdict, best = decision["verdict"], decision["model"]
        found = decision["against_original"]
        low, high = found["difference_low"], found["difference_high"]
        text = f"{signed(found['difference'], 1)} {interval(low, high, 1)}"
        change = Cell(text, value=found["difference"])
    averages = {one["name"]: one["scores"] for one in summary["models"] if not one["branch"]}
    length, cache = list(summary["kv_cache_bytes"].items())[-1]
    costs = (summary["cost"] or {}).items()
    cost = [Cell(format_money(amount, currency), value=amount) for currency, amount in costs]
    model = Path(summary["model"])
    return [
        verdict,
        change,
        *(_scores(averages.get(name, {})) for name in (ORIGINAL, HYBRID, best)),
        _share(cache["hybrid"], cache["original"], f" at {format_length(int(length))}"),
        _share(cache["vllm"], cache["vllm_original"]),
        Cell(f"{hours:,.2f}", value=hours) if hours else "",
        cost[0] if cost else "",
        model.name if model.is_absolute() else summary["model"],
        summary["method"],
    ]


def _scores(averages: dict[str, float]) -> Cell:
    """The average of the first suite, the others below it."""
    texts = [f"{format_score(value)} {suite_title(name)}" for name, value in averages.items()]
    if not texts:
        return Cell("–")
    first = next(iter(averages.values()))
    return Cell(format_score(first), value=first, more=texts[1:])


def _share(size: int | None, of: int | None, more: str = "") -> Cell:
    if not size or not of:
        return Cell("–")
    return Cell(f"{format_share(round(size / of, 3))}{more}", value=size / of)
