"""The tables of a comparison for a terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.comparison import Comparison, Result, Row, ScoreTable, label_of, tables


def print_tables(comparison: Comparison) -> None:
    """The paper's tables on the terminal: the best of a column bold, the second underlined."""
    console = Console()
    for table in tables(comparison):
        console.print(_rich(table))


def _rich(table: ScoreTable) -> Table:
    shown = Table(title=table.title, title_justify="left", pad_edge=False)
    shown.add_column("Method")
    for ratio in table.ratios:
        shown.add_column(f"ρ = {ratio:g}", justify="right")
    shown.add_row(table.original.label, *table.original.texts)
    for group, rows in table.groups.items():
        shown.add_section()
        shown.add_row(Text(group, style="italic dim"))
        for row in rows:
            shown.add_row(row.label, *(Text(t, style=_style(row, i)) for i, t in _texts(row)))
    return shown


def _texts(row: Row) -> Iterator[tuple[int, str]]:
    yield from enumerate(row.texts)


def _style(row: Row, column: int) -> str:
    return "bold" if column in row.best else "underline" if column in row.second else ""


def markdown(comparison: Comparison) -> str:
    """The page: tables, what each cell cost, and how it was made."""
    done, cells = len(comparison.results), len(comparison.cells)
    lines = [
        f"# Methods compared: {comparison.recipe}",
        "",
        f"Model: `{comparison.model}`. Scores are averages on held-out samples, in points of 100; "
        "± is the standard deviation over seeds of the search. In each column the best score is "
        "bold and the second best underlined.",
        "",
    ]
    if done < cells:
        lines += [f"{done} of {cells} cells are finished.", ""]
    for table in tables(comparison):
        lines += [f"## {table.title}", "", *_markdown_table(table), ""]
    lines += ["## Calibration scores and costs", "", *_costs(comparison), ""]
    if done == cells:
        lines += ["![Scores of every method at every ratio](compare.png)", ""]
    return "\n".join(lines)


def _markdown_table(table: ScoreTable) -> Iterator[str]:
    yield "| Method | " + " | ".join(f"ρ = {ratio:g}" for ratio in table.ratios) + " |"
    yield "|---|" + "---:|" * len(table.ratios)
    yield "| Original | " + " | ".join(table.original.texts) + " |"
    for group, rows in table.groups.items():
        yield f"| *{group}* |" + " |" * len(table.ratios)
        for row in rows:
            yield f"| {row.label} | " + " | ".join(_marked(row, i) for i, _ in _texts(row)) + " |"


def _marked(row: Row, column: int) -> str:
    text = row.texts[column]
    if column in row.best:
        return f"**{text}**"
    return f"<u>{text}</u>" if column in row.second else text


def _costs(comparison: Comparison) -> Iterator[str]:
    """Means over seeds: S(z), and the work of the search with what others had paid for."""
    yield (
        "S(z) is the exact-match rate on the calibration set. Full passes count the work of the "
        "search as if it had been alone: evaluations that another cell had paid for are included, "
        "at what they cost there. Other time is what evaluations do not take: the "
        "solver's, or that in which a static method ranks the heads."
    )
    yield ""
    yield "| Method | ρ | S(z) | log-likelihood | evaluations | full passes | other time, seconds |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for method in comparison.methods:
        for ratio in comparison.ratios:
            found = [
                result
                for cell, result in comparison.results.items()
                if (cell.method, cell.ratio) == (method, ratio)
            ]
            if found:
                yield _cost_row(label_of(method), ratio, found)


def _cost_row(label: str, ratio: float, results: list[Result]) -> str:
    def mean(name: str) -> float:
        return statistics.fmean(result.costs.get(name, 0.0) for result in results)

    score = statistics.fmean(result.calibration_score for result in results)
    likelihood = statistics.fmean(result.calibration_log_likelihood for result in results)
    passes = mean("full_forward_equivalents") + mean("reused_full_forward_equivalents")
    return (
        f"| {label} | {ratio:g} | {score:.3f} | {likelihood:.3f} | {mean('evaluations'):,.0f} "
        f"| {passes:,.1f} | {mean('solver_seconds'):,.1f} |"
    )
