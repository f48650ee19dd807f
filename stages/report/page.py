"""The report's tables and samples, its summary, and its page (page.html)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from stages.context import StageConfig
from stages.evaluate.scores import MeanScore, SuiteScores, suite_title
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
from stages.report.provenance import provenance
from stages.report.results import Model, Results, answers
from stages.report.stage import ReportConfig
from stages.search.charts import front_picture, trace

# Samples that the page shows for each score, and characters of an output.
SHOWN_SAMPLES, _SHOWN_CHARACTERS = 3, 400
# Model, suite, task, length.
Score = tuple[Model, str, str, int]


def page(results: Results, config: StageConfig[ReportConfig]) -> str:
    """The self-contained page, from the verdict down to the provenance of its numbers."""
    search = results.main.search
    share = f"ρ = {search.sliding / search.total:.3g}, W = {search.window_sizes}"
    verdict, *more = sentences(results, config.section)
    return render(
        "stages/report/page.html", title=config.section.title, search=search,
        subtitle=f"{PurePath(config.model.path).name} made hybrid: {share}, method "
        f"{search.mask.method}",
        verdict=verdict, sentences=more, notes=results.notes,
        decision=decide(results, config.section.margin), models=model_table(results),
        path=front_picture(search.front, results.main.materialized.point) if search.front
        else trace(search.summary, search.mask.mask.key, "score"),
        curves=[one for one in charts.curves_of(results) if one],
        cache=charts.memory_by_length(results), lengths=length_table(results),
        mask=charts.head_mask(search), scores=score_table(results),
        samples=shown_samples(results), anchor=anchor, provenance=provenance(config, results),
    )  # fmt: skip


def summarize(results: Results, section: ReportConfig) -> dict[str, Any]:
    """The page's numbers; scores in points."""
    main, price = results.main, section.gpu_hour_price
    search, decision = main.search, decide(results, section.margin)
    lengths = results.lengths or [main.config.max_positions or 32 * 1024]
    models = model_table(results)
    return {
        "title": section.title,
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
                **model._asdict(), "tokens": model.tokens,
                "scores": {name: one.average for name, one in results.tables(model).items()},
                "last_loss": None if (loss := last_loss(results, model)) is None else loss.mean,
                "recipe_is_ahead_by": None if (found := gain(results, model)) is None
                else found[1].model_dump(mode="json"),
            }
            for model in results.models
        ],
        "table": models.records if models is not None else [],
        "kv_cache_bytes": {str(length): main.caches(length)._asdict() for length in lengths},
        "gpu_hours": results.gpu_hours,
        "cost": None if price is None
        else {section.currency: round(price * results.total_gpu_hours, 2)},
    }  # fmt: skip


def model_table(results: Results) -> Table | None:
    """A row for each model: scores, how far the recipe's is ahead, last loss, cache; or None."""
    suites, models = results.suites, results.models
    has_losses = any(last_loss(results, model) for model in models)
    gains = {model: found[1] for model in models if (found := gain(results, model))}
    tokens = results.longest
    header = ["model", *(f"{suite_title(suite)}, average" for suite in suites)]
    header += ["the recipe's hybrid is ahead by"] if gains else []
    if has_losses:
        tables = filter(None, map(results.positions, models))
        first, end = next(table for table in tables if table.difference).edges[-2:]
        header.append(f"loss above the original's, tokens {first:,} to {end - 1:,}")
    header.append(f"KV cache at {format_length(tokens)}")
    rows = []
    for model in models:
        row = [model.label]
        row += [_average(results.tables(model).get(suite), model) for suite in suites]
        if gains:
            row.append(points(gains[model]) if model in gains else "")
        row += [_loss(results, model)] if has_losses else []
        caches = results.branches[model.branch].caches(tokens)
        if model.is_original:
            row.append(format_bytes(caches.original))
        elif not model.is_hybrid:
            row.append("–")
        else:
            vllm = caches.vllm_share
            more = [] if vllm is None else [f"{format_share(round(vllm, 3))} in vLLM"]
            share = format_share(round(caches.share, 3))
            row.append(Cell(f"{share} in generate", more=more))
        rows.append(row)
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
    groups = []
    for suite in results.suites:
        scored = {model: tables[model][suite] for model in tables if suite in tables[model]}
        places = dict.fromkeys(
            (task, at) for one in scored.values() for task, by in one.tasks.items() for at in by
        )
        rows: list[list[str]] = []
        for task, at in places:
            found = {model: one.tasks.get(task, {}).get(at) for model, one in scored.items()}
            cells = (_score(found.get(model), anchor(model, suite, task, at)) for model in tables)
            rows.append([task, format_length(at) if at else "", *cells])
        groups += [Group(rows), Group(list(_totals(suite, list(tables), scored)), is_total=True)]
    header = ["task", "context", *(model.label for model in tables)]
    return Table("", header, groups, text_columns=1) if groups else None


def _totals(
    suite: str, models: list[Model], scored: dict[Model, SuiteScores]
) -> Iterable[list[str]]:
    for at in sorted({at for one in scored.values() for at in one.by_length}):
        found = {model: one.by_length.get(at) for model, one in scored.items()}
        cells = (_score(found.get(model), anchor(model)) for model in models)
        yield [f"{suite_title(suite)}, all tasks", format_length(at) if at else "", *cells]
    for group in dict.fromkeys(group for one in scored.values() for group in one.groups):
        means = {model: one.groups.get(group) for model, one in scored.items()}
        largest = max((mean for mean in means.values() if mean), key=lambda mean: len(mean.tasks))
        label = f"{group} ({len(largest.tasks)} of {largest.of} tasks)"
        yield [label, "", *(_score(means.get(model), anchor(model)) for model in models)]


def _score(score: MeanScore | None, target: str) -> Cell:
    if score is None:
        return Cell(format_score(None))
    ends = f"{format_score(score.low)}–{format_score(score.high)}"
    share = score.score / 100
    return Cell(format_score(score.score), target=f"#{target}", more=[ends], share=share)


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


def anchor(model: Model, *place: str | int) -> str:
    """The id on the page of a model's samples or, with suite, task and length, of a score's."""
    name = f"{model.name}@{model.branch}" if model.branch else model.name
    return re.sub(r"[^\w.-]+", "_", "-".join(("samples", name, *map(str, place))))


def shown_samples(results: Results) -> dict[Model, dict[str, dict[str, Any]]]:
    """By model and anchor of a score: its label, and the samples with the lowest scores."""
    models: dict[Model, dict[str, dict[str, Any]]] = {model: {} for model in results.models}
    for branch, own in results.branches.items():
        for record in answers(own.folders):
            model = Model(record["checkpoint"], branch)
            if "score" in record and model in models:
                suite, task, length = record["suite"], record["task"], record["length"]
                label = f"{task} at {format_length(length)}" if length else task
                cell = models[model].setdefault(
                    anchor(model, suite, task, length), {"label": label, "samples": []}
                )
                cell["samples"].append(record)
                cell["samples"].sort(key=lambda one: (one["score"], one["index"]))
                del cell["samples"][SHOWN_SAMPLES:]
    for cell in (cell for cells in models.values() for cell in cells.values()):
        cell["samples"] = list(map(_sample, cell["samples"]))
    return {model: cells for model, cells in models.items() if cells}


def _sample(record: Mapping[str, Any]) -> dict[str, str]:
    return {
        "score": f"{record['index']}: {format_score(100 * record['score'])}",
        "prompt": str(record.get("question", "")),
        "expected": ", ".join(map(str, record.get("answers", ()))),
        "output": str(record.get("output", ""))[:_SHOWN_CHARACTERS],
    }
