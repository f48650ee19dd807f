"""The report: a self-contained page (page.html), its table as CSV and printed, a summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from bosch.files import write_json, write_text
from bosch.window import Window, windows_text
from stages.context import StageConfig
from stages.evaluate.scores import ORIGINAL, MeanScore, SuiteScores, suite_title
from stages.formats import (
    CHECKOUT,
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
    format_share,
    interval,
    signed,
)
from stages.pages.page import render
from stages.pages.tables import Cell, Row, Table
from stages.published import Manifest, Summary
from stages.report import charts
from stages.report.decision import decide, gain, last_loss, points, sentences
from stages.report.results import Model, Results, load_results
from stages.report.stage import PAGE, TABLE, ReportConfig
from stages.search.charts import front_picture, trace

# A score's name and length, and whether it summarises others.
_Place = tuple[str, int, bool]
_MEASURED = (
    ("prefill_tokens_per_second", format_count), ("decode_tokens_per_second", format_count),
    ("memory_peak_bytes", format_bytes),
)  # fmt: skip


def run(
    config: StageConfig[ReportConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write index.html, models.csv and summary.json below `work_dir`; print table and sentences.

    `inputs` maps the names of the recipe's stages, and `<stage>@<branch>`, to their published
    directories. Returns the content of summary.json.
    Raises RunError when a published directory is incomplete.
    """
    results = load_results(inputs)
    write_text(work_dir / PAGE, page(results, config))
    summary = summarize(results, config.section)
    write_json(work_dir / Summary.FILE, summary)
    table = model_table(results)
    if table.records:
        text = io.StringIO()
        writer = csv.DictWriter(text, table.header)
        writer.writeheader()
        writer.writerows(table.records)
        write_text(work_dir / TABLE, text.getvalue())
        table.print()
    verdict, *more = summary["sentences"]
    if decision := summary["decision"]:
        verdict += f"\nThe model: {decision['folder']}, in the run's folder."
    for sentence in [verdict, *more, *results.notes]:
        Console().print(Text(sentence))
    return summary


def page(results: Results, config: StageConfig[ReportConfig]) -> str:
    """The self-contained page, from the verdict down to the provenance of its numbers."""
    main, mask, margin = results.main, results.main.found.mask, config.section.margin
    windows = windows_text([Window(window.size) for window in mask.menu])
    verdict, *more = sentences(results, margin)
    path = trace(main.search, mask.key, "score")
    if main.front is not None:
        path = front_picture(main.front, main.materialized.point)
    curves = (
        charts.scores_by_tokens(results), charts.loss_by_position(results),
        charts.training_loss(results.training, config.upstream.get("train")),
    )  # fmt: skip
    return render(
        "stages/report/page.html", title=config.section.title, main=main, windows=windows,
        subtitle=f"{PurePath(config.model.path).name} made hybrid: ρ = {mask.swa_ratio:.3g}, "
        f"W = {windows}, method {main.found.method}",
        verdict=verdict, sentences=more, notes=results.notes, decision=decide(results, margin),
        models=model_table(results), path=path, curves=[one for one in curves if one],
        cache=charts.memory_by_length(results), lengths=length_table(results),
        mask=charts.head_mask(mask), scores=score_table(results),
        stages=[(name, _facts(manifest)) for name, manifest in results.manifests.items()],
        recipe=provenance(config, results),
    )  # fmt: skip


def summarize(results: Results, section: ReportConfig) -> dict[str, Any]:
    """The page's numbers; scores in points."""
    main, decision = results.main, decide(results, section.margin)
    return {
        "title": section.title,
        "model": main.found.model,
        "method": main.found.method,
        "sentences": sentences(results, section.margin),
        "decision": None if decision is None else {
            "verdict": decision.verdict, "model": decision.model.name, "folder": decision.folder,
            "margin": section.margin,
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
        "table": model_table(results).records,
        "kv_cache_bytes": {str(at): main.caches(at)._asdict() for at in results.lengths},
    }  # fmt: skip


def model_table(results: Results) -> Table:
    """A row for each model: scores, how far the recipe's is ahead, last loss, cache."""
    suites, models, tokens = results.suites, results.models, results.lengths[-1]
    gains = {model: found[1] for model in models if (found := gain(results, model))}
    losses = [table for table in map(results.positions, models) if table and table.difference]
    header = ["model", *(f"{suite_title(suite)}, average" for suite in suites)]
    header += ["the recipe's hybrid is ahead by"] if gains else []
    if losses:
        first, end = losses[0].edges[-2:]
        header.append(f"loss above the original's, tokens {first:,} to {end - 1:,}")
    header.append(f"KV cache at {format_length(tokens)}")
    rows: list[Row] = []
    for model in models:
        row: list[str | Cell] = [model.label]
        row += (_average(results.tables(model).get(suite)) for suite in suites)
        row += [points(gains[model]) if model in gains else ""] if gains else []
        row += [_loss(results, model)] if losses else []
        caches, cell = results.branches[model.branch].caches(tokens), Cell("–")
        if model.name == ORIGINAL:
            cell = Cell(format_bytes(caches.original))
        elif model.is_hybrid:
            vllm = caches.vllm_share
            note = "" if vllm is None else f"{format_share(round(vllm, 3))} in vLLM"
            cell = Cell(f"{format_share(round(caches.share, 3))} in generate", note)
        rows.append([*row, cell])
    return Table("", header, [rows], text_columns=1)


def _average(suite: SuiteScores | None) -> Cell:
    if suite is None:
        return Cell("–")
    compared = suite.against_original
    return Cell(format_score(suite.average), "" if compared is None else points(compared))


def _loss(results: Results, model: Model) -> Cell:
    if (loss := last_loss(results, model)) is None:
        return Cell("0" if model.name == ORIGINAL else "–")
    known = loss.low is not None and loss.high is not None
    ends = interval(loss.low or 0.0, loss.high or 0.0, 2) if known else "[too few]"
    return Cell(signed(loss.mean, 2), ends)


def score_table(results: Results) -> Table | None:
    """A row for each task and length of every suite, a column for each model; None without any."""
    tables = {model: results.tables(model) for model in results.models if results.tables(model)}
    groups: list[list[Row]] = []
    for suite in results.suites:
        scored = [_scores(suite, own[suite]) if suite in own else {} for own in tables.values()]
        places = dict.fromkeys(place for found in scored for place in found)
        for is_total in (False, True):
            groups.append([
                [name, format_length(at) if at else "",
                 *(_score(found.get((name, at, is_total))) for found in scored)]
                for name, at, total in places if total == is_total
            ])  # fmt: skip
    header = ["task", "context", *(model.label for model in tables)]
    return Table("", header, groups, text_columns=1) if groups else None


def _scores(suite: str, table: SuiteScores) -> Mapping[_Place, MeanScore]:
    """The scores of tasks, of all tasks at a length, and of groups."""
    found: dict[_Place, MeanScore] = {
        (task, at, False): score for task, by in table.tasks.items() for at, score in by.items()
    }
    name = f"{suite_title(suite)}, all tasks"
    found |= {(name, at, True): score for at, score in table.by_length.items()}
    return found | {
        (f"{group} ({len(score.tasks)} of {score.of} tasks)", 0, True): score
        for group, score in table.groups.items()
    }


def _score(score: MeanScore | None) -> Cell:
    if score is None:
        return Cell(format_score(None))
    ends = f"{format_score(score.low)}–{format_score(score.high)}"
    return Cell(format_score(score.score), ends)


def length_table(results: Results) -> Table:
    """The KV cache of one request by its length, and the measured speed and memory if any."""
    efficiency = results.efficiency
    points = {(one.length, one.model): one for one in efficiency.points} if efficiency else {}
    rows: list[Row] = []
    for length in sorted({*results.lengths, results.main.config.max_positions or 0} - {0}):
        caches = results.main.caches(length)
        row: list[str | Cell] = [format_length(length)]
        for size, of in zip(
            caches, (None, caches.original, None, caches.vllm_original), strict=True
        ):
            share = format_share(round(size / of, 3)) if size and of else ""
            row.append(Cell("–" if size is None else format_bytes(size), share))
        pair = [points.get((length, model)) for model in ("original", "hybrid")]
        for field, form in _MEASURED if points else ():
            texts = [
                "–" if one is None else "out of memory" if one.out_of_memory
                else form(getattr(one, field)) for one in pair
            ]  # fmt: skip
            row.append(" → ".join(texts) if any(pair) else "–")
        rows.append(row)
    header = ["context", "KV cache in generate, original", "hybrid", "in vLLM, original", "hybrid"]
    title = ""
    if efficiency is not None:
        header += ["prefill, tokens/s", "decoding, tokens/s", "peak memory"]
        title = f"Speed and memory measured on {efficiency.machine}"
    return Table(title, header, [rows])


def provenance(config: StageConfig[ReportConfig], results: Results) -> str:
    """The resolved recipe, the text of the evaluation and the versions of packages, as YAML."""
    packages = {one for manifest in results.manifests.values() for one in manifest.packages.items()}
    facts = {
        "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        **{key: section.model_dump(mode="json") for key, section in config.upstream.items()},
        "text of the evaluation": results.main.scores.corpus or {},
        "packages": [" ".join(one) for one in sorted(packages)],
    }
    return yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).replace(f"{CHECKOUT}/", "")


def _facts(manifest: Manifest) -> str:
    hours, commit = manifest.gpu_hours, manifest.git_commit or ""
    changed = ", with local changes" if commit.endswith("+") else ""
    facts = (
        format_seconds(manifest.seconds),
        f"{hours:,.2f} GPU hours on {manifest.gpus} GPUs" if hours else "",
        f"key {manifest.key[:12]}",
        f"commit {commit[:12]}{changed}" if commit else "",
        manifest.created or "",
    )
    return ", ".join(filter(None, facts))
