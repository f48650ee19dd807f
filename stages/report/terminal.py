"""The report's headline on the terminal, and the same numbers as a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from stages.evaluate.scores import HYBRID, ORIGINAL
from stages.evaluate.suites import suite_title
from stages.formats import format_bytes, format_count, format_money, format_score, format_seconds
from stages.pages.tables import Group, Table
from stages.report.decision import comparisons, headline
from stages.report.results import NEEDLE, Results
from stages.report.stage import ReportConfig
from stages.report.verdict import differences, final_model, verdict
from stages.train.stage import checkpoint_tokens

ABSENT = "not part of this recipe"


def summarize(results: Results, title: str, section: ReportConfig) -> dict[str, Any]:
    """Headline numbers, null where their stage is not part of the recipe; scores from 0 to 100."""
    price, gpu_hours = section.gpu_hour_price, results.total_gpu_hours
    original, hybrid = results.checkpoint("original"), results.checkpoint("hybrid")
    trained, search, cache = results.trained, results.search, results.cache
    sizes = [window.size for window in search.windows[::-1]]
    budget = results.materialized.budget
    return {
        "title": title,
        "model": search.mask.model,
        "method": search.mask.method,
        "headline": headline(results, section),
        "verdict": verdict(results),
        "comparisons": comparisons(results),
        "measured": [
            point.model_dump(mode="json", include={"length", "over_original"})
            for point in results.measured_points
        ],
        "differences": [
            {"name": row.name, "unit": row.unit, "mean": row.mean, "low": row.low, "high": row.high}
            for row in differences(results, final_model(results))
        ],
        "needle": {
            "original": original.average if original else None,
            "hybrid": hybrid.average if hybrid else None,
            "rivals": {rival.name: rival.average for rival in results.rivals},
            "trained": trained.average if trained else None,
            "trained_tokens": trained.tokens if trained else None,
        },
        "swa_ratio": search.sliding / search.total,
        "window_size": sizes[-1],
        **({"window_sizes": sizes} if len(sizes) > 1 else {}),
        "sinks": search.mask.sinks,
        **({} if budget is None else {"budget": budget.model_dump()}),
        **({} if search.front is None else {"point": search.front.chosen}),
        "kv_cache_bytes_per_token": {
            "before": cache.original_per_token,
            "after": cache.per_token,
            "window_bytes": cache.sliding_bytes,
        },
        "stage_seconds": dict(results.stage_seconds),
        "gpu_hours": results.gpu_hours,
        "cost": None if price is None else {section.currency: round(price * gpu_hours, 2)},
        "absent_stages": list(results.absent),
    }


def print_summary(results: Results, summary: dict[str, Any]) -> None:
    """Print the headline table and sentences of `summary`."""
    rows = _rows(results)
    if results.total_gpu_hours:
        costs = (format_money(amount, name) for name, amount in (summary["cost"] or {}).items())
        facts = [f"{results.total_gpu_hours:,.2f}", *costs]
        rows.append(("GPU hours", ", ".join(facts)))
    Table(summary["title"], ("", "value"), [Group(rows)], text_columns=1).print()
    sentences = [summary[name] for name in ("headline", "verdict", "comparisons")]
    for sentence in [*filter(None, sentences), *results.scores.notes()]:
        Console().print(Text(sentence))


def _rows(results: Results) -> list[tuple[str, str]]:
    search, cache = results.search, results.cache
    before, after = format_bytes(cache.original_per_token), format_bytes(cache.per_token)
    share = f"{search.sliding / search.total:.3g}"
    scores = results.scores.checkpoints.values()
    rows = [
        row
        for suite in dict.fromkeys(name for suites in scores for name in suites) or [NEEDLE]
        for row in _averages(results, suite)
    ]
    rows += [
        ("KV cache per token", f"{before} → {after}"),
        ("KV cache of the windows, at most", format_bytes(cache.sliding_bytes)),
        *_budget(results),
        ("Sliding KV heads (ρ)", f"{share} ({search.sliding} of {search.total})"),
        ("Window (W)", f"{search.window_sizes} tokens"),
    ]
    rows += [(f"Time, {stage}", format_seconds(value)) for stage, value in results.stage_seconds]
    return rows


def _budget(results: Results) -> list[tuple[str, str]]:
    if (budget := results.materialized.budget) is None:
        return []
    sizes = f"{format_bytes(budget.original)} → {format_bytes(budget.bytes)}"
    return [(f"KV cache at {budget.tokens:,} tokens", sizes)]


def _averages(results: Results, suite: str) -> Iterator[tuple[str, str]]:
    """A suite's averages of all models, in the order of the pipeline."""
    name = results.scores.last_trained
    tokens = checkpoint_tokens(name) if name is not None else None
    training = f" after {format_count(tokens)} tokens" if tokens else ""
    title = f"{suite_title(suite)} average"
    yield f"{title}, original", _score(results, suite, ORIGINAL)
    for rival in results.rivals if suite == NEEDLE else ():
        yield f"{title}, {rival.label}", format_score(rival.average)
    yield f"{title}, hybrid untrained", _score(results, suite, HYBRID)
    is_trained = "train" in results.present
    score = _score(results, suite, name) if is_trained else ABSENT
    yield f"{title}, hybrid trained{training}", score


def _score(results: Results, suite: str, name: str | None) -> str:
    if "evaluate" not in results.present:
        return ABSENT
    scores = results.scores.checkpoints.get(name or "", {}).get(suite)
    return format_score(scores.average) if scores else "not evaluated"
