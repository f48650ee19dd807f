"""The report's headline on the terminal, and the same numbers as a dictionary."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from stages.report.decision import decide, gain, last_loss, sentences
from stages.report.page import model_table
from stages.report.results import Results
from stages.report.stage import ReportConfig


def summarize(results: Results, title: str, section: ReportConfig) -> dict[str, Any]:
    """The page's numbers, null where their stage is not part of the recipe; scores in points."""
    main, price = results.main, section.gpu_hour_price
    search, decision = main.search, decide(results, section.margin)
    lengths = results.lengths or [main.config.max_positions or 32 * 1024]
    losses = {model: last_loss(results, model) for model in results.models}
    budget = main.materialized.budget
    return {
        "title": title,
        "model": search.mask.model,
        "method": search.mask.method,
        "sentences": sentences(results, section),
        "decision": None if decision is None else {
            "verdict": decision.verdict, "model": decision.model.name, "folder": decision.folder,
            "margin": section.margin, "needed_samples": decision.needed,
            "against_original": decision.against.model_dump(mode="json"),
        },
        "models": [
            {
                **model._asdict(), "tokens": model.tokens, "label": model.label,
                "scores": {name: one.average for name, one in results.tables(model).items()},
                "last_loss": None if loss is None else loss.mean,
                "recipe_is_ahead_by": None if (found := gain(results, model)) is None
                else found[1].model_dump(mode="json"),
            }
            for model, loss in losses.items()
        ],
        "measured": [
            point.model_dump(mode="json", include={"length", "over_original"})
            for point in results.measured_points
        ],
        "swa_ratio": search.sliding / search.total,
        "window_sizes": [window.size for window in search.windows[::-1]],
        "sinks": search.mask.sinks,
        "kv_cache_bytes": {str(length): main.caches(length)._asdict() for length in lengths},
        **({} if budget is None else {"budget": budget.model_dump()}),
        **({} if search.front is None else {"point": search.front.chosen}),
        "stage_seconds": results.stage_seconds,
        "gpu_hours": results.gpu_hours,
        "cost": None if price is None
        else {section.currency: round(price * results.total_gpu_hours, 2)},
        "absent_stages": list(results.absent),
    }  # fmt: skip


def print_summary(results: Results, summary: dict[str, Any]) -> None:
    """Print the table of models, and the sentences of `summary`."""
    if (table := model_table(results)) is not None:
        table.print()
    decision = summary["decision"]
    folder = [f"The model: {decision['folder']}, in the run's folder."] if decision else []
    verdict, *more = summary["sentences"]
    for sentence in [verdict, *folder, *more, *results.notes]:
        Console().print(Text(sentence))
