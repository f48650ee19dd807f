"""The report's headline on the terminal, and the same numbers as a dictionary."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from stages.reporting.formats import format_bytes, format_count, format_score, format_seconds
from stages.reporting.results import Results

ABSENT = "not part of this recipe"


def summarize(results: Results, title: str) -> dict[str, Any]:
    """Headline numbers; null where the recipe has no such stage. Scores in points of 100."""
    original, hybrid = results.checkpoint("original"), results.checkpoint("hybrid")
    trained, search, cache = results.trained, results.search, results.cache
    return {
        "title": title,
        "needle": {
            "original": original.average if original else None,
            "hybrid": hybrid.average if hybrid else None,
            "trained": trained.average if trained else None,
            "trained_tokens": trained.tokens if trained else None,
        },
        "swa_ratio": search.sliding / search.total if search else None,
        "window_size": search.window_size if search else None,
        "sinks": search.sinks if search else None,
        "kv_cache_bytes_per_token": {
            "before": cache.before_per_token if cache else None,
            "after": cache.after_per_token if cache else None,
            "window_bytes": cache.window_bytes if cache else None,
        },
        "stage_seconds": dict(results.stage_seconds),
        "absent_stages": [
            stage
            for stage in ("prepare", "search", "materialize", "train", "evaluate")
            if stage not in results.present
        ],
    }


def print_summary(results: Results, title: str) -> None:
    """Print the headline table."""
    table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _rows(results):
        table.add_row(name, value)
    Console().print(table)


def _rows(results: Results) -> list[tuple[str, str]]:
    trained, search, cache = results.trained, results.search, results.cache
    after = f" after {format_count(trained.tokens or 0)} tokens" if trained else ""
    rows = [
        ("Needle average, original", _score(results, "original")),
        ("Needle average, hybrid untrained", _score(results, "hybrid")),
        (f"Needle average, hybrid trained{after}", _score(results, None)),
    ]
    if cache is not None:
        before, now = format_bytes(cache.before_per_token), format_bytes(cache.after_per_token)
        rows.append(("KV cache per token", f"{before} → {now}"))
        rows.append(("KV cache of the windows, at most", format_bytes(cache.window_bytes)))
    else:
        rows.append(("KV cache per token", ABSENT))
    if search is not None:
        share = f"{search.sliding / search.total:.3g}"
        rows.append(("Sliding KV heads (ρ)", f"{share} ({search.sliding} of {search.total})"))
        rows.append(("Window (W)", f"{search.window_size:,} tokens"))
    else:
        rows.append(("Sliding KV heads (ρ)", ABSENT))
    rows += [(f"Time, {stage}", format_seconds(value)) for stage, value in results.stage_seconds]
    return rows


def _score(results: Results, name: str | None) -> str:
    if "evaluate" not in results.present or (name is None and "train" not in results.present):
        return ABSENT
    scores = results.trained if name is None else results.checkpoint(name)
    return format_score(scores.average) if scores else "not evaluated"
