"""The report's tables, and its page (page.html)."""

from __future__ import annotations

from collections.abc import Iterable

from stages.evaluate.scores import MeanScore, SuiteScores
from stages.evaluate.suites import suite_title
from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_share,
    interval,
    signed,
)
from stages.pages.page import render
from stages.pages.tables import Cell, Group, Table
from stages.report import charts
from stages.report.decision import decide, gain, last_loss, points, sentences
from stages.report.predictions import anchor, samples_by_model
from stages.report.provenance import Provenance
from stages.report.results import SHOWN_SAMPLES, Model, Results
from stages.report.stage import ReportConfig
from stages.search.charts import front_picture, trace

_TEMPLATE = "stages/report/page.html"


def page(results: Results, provenance: Provenance, section: ReportConfig) -> str:
    """The self-contained page, from the verdict down to the provenance of its numbers."""
    search = results.main.search
    verdict, *more = sentences(results, section)
    return render(
        _TEMPLATE, title=provenance.title, subtitle=provenance.subtitle, provenance=provenance,
        verdict=verdict, sentences=more, notes=results.notes,
        decision=decide(results, section.margin), models=model_table(results),
        front=front_picture(search.front) if search.front else None,
        trace=trace(search.summary, search.mask.mask.key, "score"), search=search,
        by_tokens=charts.scores_by_tokens(results), positions=charts.loss_by_position(results),
        loss=charts.training_loss(results.training, results.loss_in_words),
        cache=charts.memory_by_length(results), lengths=length_table(results),
        mask=charts.head_mask(search), scores=score_table(results), filters=filters(results),
        predictions=samples_by_model(results.predictions), shown_samples=SHOWN_SAMPLES,
    )  # fmt: skip


def model_table(results: Results) -> Table | None:
    """A row for each model: its scores, how far the recipe's is ahead, its last loss; or None."""
    suites, models = results.suites, results.models
    has_losses = any(last_loss(results, model) for model in models)
    gains = {model: found[1] for model in models if (found := gain(results, model))}
    header = ["model", *(f"{suite_title(suite)}, average" for suite in suites)]
    header += ["the recipe's hybrid is ahead by"] if gains else []
    if has_losses:
        tables = filter(None, map(results.positions, models))
        first, end = next(table for table in tables if table.difference).edges[-2:]
        header.append(f"loss above the original's, tokens {first:,} to {end - 1:,}")
    rows = []
    for model in models:
        row = [model.label]
        row += [_average(results.tables(model).get(suite), model) for suite in suites]
        if gains:
            row.append(points(gains[model]) if model in gains else "")
        rows.append(row + ([_loss(results, model)] if has_losses else []))
    return Table("", header, [Group(rows)], text_columns=1) if rows else None


def _average(suite: SuiteScores | None, model: Model) -> Cell:
    if suite is None:
        return Cell("–")
    more = [] if suite.against_original is None else [points(suite.against_original)]
    return Cell(format_score(suite.average), target=f"#{anchor(model)}", more=more)


def _loss(results: Results, model: Model) -> Cell:
    loss = last_loss(results, model)
    if loss is None:
        return Cell("0" if model.is_original else "–")
    known = loss.low is not None and loss.high is not None
    ends = interval(loss.low or 0.0, loss.high or 0.0, 2) if known else "[too few]"
    return Cell(signed(loss.mean, 2), more=[ends])


def score_table(results: Results) -> Table | None:
    """A row for each task and length of every suite, a column for each model; None without any."""
    tables = {model: results.tables(model) for model in results.models if results.tables(model)}
    models = list(tables)
    groups = []
    for suite in results.suites:
        scored = {name: tables[name][suite] for name in models if suite in tables[name]}
        places = dict.fromkeys(
            (task, at) for one in scored.values() for task, by in one.tasks.items() for at in by
        )
        rows: list[list[str]] = []
        for task, at in places:
            text = format_length(at) if at else ""
            found = {name: one.tasks.get(task, {}).get(at) for name, one in scored.items()}
            cells = (_score(found.get(name), anchor(name, suite, task, at)) for name in models)
            rows.append([Cell(task, task=task, length=text), text, *cells])
        groups += [Group(rows), Group(list(_totals(suite, models, scored)), is_total=True)]
    header = ["task", "context", *(model.label for model in models)]
    return Table("", header, groups, text_columns=1) if groups else None


def _totals(
    suite: str, models: list[Model], scored: dict[Model, SuiteScores]
) -> Iterable[list[str]]:
    for at in sorted({at for one in scored.values() for at in one.by_length}):
        text = format_length(at) if at else ""
        found = {name: one.by_length.get(at) for name, one in scored.items()}
        cells = (_score(found.get(name), anchor(name)) for name in models)
        yield [Cell(f"{suite_title(suite)}, all tasks", length=text), text, *cells]
    for group in dict.fromkeys(group for one in scored.values() for group in one.groups):
        means = {name: one.groups.get(group) for name, one in scored.items()}
        largest = max((mean for mean in means.values() if mean), key=lambda mean: len(mean.tasks))
        label = f"{group} ({len(largest.tasks)} of {largest.of} tasks)"
        yield [label, "", *(_score(means.get(name), anchor(name)) for name in models)]


def _score(score: MeanScore | None, target: str) -> Cell:
    if score is None:
        return Cell(format_score(None))
    ends = f"{format_score(score.low)}–{format_score(score.high)}"
    share = score.score / 100
    return Cell(format_score(score.score), target=f"#{target}", more=[ends], share=share)


def filters(results: Results) -> dict[str, list[str]]:
    """Tasks and lengths that have a score, for the page's filter."""
    tables = [one.tasks for model in results.models for one in results.tables(model).values()]
    lengths = {at for table in tables for by_length in table.values() for at in by_length if at}
    return {
        "task": list(dict.fromkeys(task for table in tables for task in table)),
        "length": [format_length(length) for length in sorted(lengths)],
    }


def length_table(results: Results) -> Table:
    """The KV cache of one request by its length, and the measured speed and memory if any."""
    points = {(point.length, point.model): point for point in results.efficiency.points} if (
        results.efficiency
    ) else {}  # fmt: skip
    longest = results.main.config.max_positions
    rows = []
    for length in sorted({*results.lengths, *([longest] if longest else [])}) or [32 * 1024]:
        caches = results.main.caches(length)
        row = [format_length(length), _size(caches.original), _size(caches.hybrid, caches.original)]
        row += [_size(caches.vllm_original), _size(caches.vllm, caches.vllm_original)]
        for field in ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_peak_bytes"):
            form = format_bytes if field.endswith("bytes") else format_count
            texts = []
            for model in ("original", "hybrid") if points else ():
                point = points.get((length, model))
                value = getattr(point, field, None)
                memory = "out of memory" if point is not None and point.out_of_memory else "–"
                texts.append(memory if value is None else form(value))
            row += [" → ".join(texts) if {*texts} != {"–"} else "–"] if points else []
        rows.append(row)
    header = ["context", "KV cache in generate, original", "hybrid", "in vLLM, original", "hybrid"]
    title = ""
    if results.efficiency is not None:
        header += ["prefill, tokens/s", "decoding, tokens/s", "peak memory"]
        settings = results.efficiency.settings
        title = f"Speed and memory measured on {results.efficiency.machine}"
        title += f" in {settings['dtype']}" if "dtype" in settings else ""
    return Table(title, header, [Group(rows)], text_columns=0)


def _size(size: int | None, of: int | None = None) -> Cell:
    if size is None:
        return Cell("–")
    return Cell(format_bytes(size), more=[format_share(round(size / of, 3))] if of else [])
