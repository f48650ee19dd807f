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
from stages.evaluate.scores import MeanScore, SuiteScores, suite_title
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
from stages.pages.tables import Cell, Group, Table
from stages.published import Manifest, Summary
from stages.report import charts
from stages.report.decision import decide, gain, last_loss, points, sentences
from stages.report.results import Model, Results, load_results
from stages.report.stage import PAGE, TABLE, ReportConfig
from stages.search.charts import front_picture, trace
from stages.train.stage import TrainConfig

# A score's name and length, and whether it summarises others.
_Place = tuple[str, int, bool]


def run(
    config: StageConfig[ReportConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write index.html, models.csv and summary.json below `work_dir`; print table and sentences.

    `inputs` maps the names of the recipe's stages, and `<stage>@<branch>`, to their published
    directories. Returns the content of summary.json.
    Raises RunError when a published directory is incomplete.
    """
    train = config.upstream.get("train")
    training = train if isinstance(train, TrainConfig) else None
    results = load_results(inputs, training)
    write_text(work_dir / PAGE, page(results, config))
    summary = summarize(results, config.section)
    write_json(work_dir / Summary.FILE, summary)
    if (table := model_table(results)) is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, table.header)
        writer.writeheader()
        writer.writerows(table.records)
        write_text(work_dir / TABLE, text.getvalue())
        table.print()
    verdict, *more = summary["sentences"]
    if decision := summary["decision"]:
        more = [f"The model: {decision['folder']}, in the run's folder.", *more]
    for sentence in [verdict, *more, *results.notes]:
        Console().print(Text(sentence))
    return summary


def page(results: Results, config: StageConfig[ReportConfig]) -> str:
    """The self-contained page, from the verdict down to the provenance of its numbers."""
    main, mask, margin = results.main, results.main.mask, config.section.margin
    windows = windows_text([Window(window.size) for window in mask.menu])
    verdict, *more = sentences(results, margin)
    path = trace(main.search, mask.key, "score")
    if main.front is not None:
        path = front_picture(main.front, main.materialized.point)
    curves = (
        charts.scores_by_tokens(results), charts.loss_by_position(results),
        charts.training_loss(results.training, results.loss_in_words),
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
    models = model_table(results)
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
        "table": models.records if models is not None else [],
        "kv_cache_bytes": {str(at): main.caches(at)._asdict() for at in results.lengths},
        "gpu_hours": {name: manifest.gpu_hours for name, manifest in results.manifests.items()},
    }  # fmt: skip


def model_table(results: Results) -> Table | None:
    """A row for each model: scores, how far the recipe's is ahead, last loss, cache; or None."""
    suites, models, tokens = results.suites, results.models, results.lengths[-1]
    gains = {model: found[1] for model in models if (found := gain(results, model))}
    losses = [table for table in map(results.positions, models) if table and table.difference]
    header = ["model", *(f"{suite_title(suite)}, average" for suite in suites)]
    header += ["the recipe's hybrid is ahead by"] if gains else []
    if losses:
        first, end = losses[0].edges[-2:]
        header.append(f"loss above the original's, tokens {first:,} to {end - 1:,}")
    header.append(f"KV cache at {format_length(tokens)}")
    rows = []
    for model in models:
        row = [model.label, *(_average(results.tables(model).get(suite)) for suite in suites)]
        row += [points(gains[model]) if model in gains else ""] if gains else []
        row += [_loss(results, model)] if losses else []
        caches, cell = results.branches[model.branch].caches(tokens), Cell("–")
        if model.is_original:
            cell = Cell(format_bytes(caches.original))
        elif model.is_hybrid:
            vllm = caches.vllm_share
            more = [] if vllm is None else [f"{format_share(round(vllm, 3))} in vLLM"]
            cell = Cell(f"{format_share(round(caches.share, 3))} in generate", more=more)
        rows.append([*row, cell])
    return Table("", header, [Group(rows)], text_columns=1) if rows else None


def _average(suite: SuiteScores | None) -> Cell:
    if suite is None:
        return Cell("–")
    more = [] if suite.against_original is None else [points(suite.against_original)]
    return Cell(format_score(suite.average), more=more)


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
        scored = [_scores(suite, own[suite]) if suite in own else {} for own in tables.values()]
        places = dict.fromkeys(place for found in scored for place in found)
        for is_total in (False, True):
            rows = [
                [name, format_length(at) if at else "",
                 *(_score(found.get((name, at, is_total))) for found in scored)]
                for name, at, total in places if total == is_total
            ]  # fmt: skip
            groups.append(Group(rows, is_total))
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
    return Cell(format_score(score.score), more=[ends])


def length_table(results: Results) -> Table:
    """The KV cache of one request by its length, and the measured speed and memory if any."""
    efficiency = results.efficiency
    points = {(one.length, one.model): one for one in efficiency.points} if efficiency else {}
    rows = []
    for length in sorted({*results.lengths, results.main.config.max_positions or 0} - {0}):
        caches = results.main.caches(length)
        row: list[str] = [format_length(length)]
        for size, of in zip(
            caches, (None, caches.original, None, caches.vllm_original), strict=True
        ):
            more = [format_share(round(size / of, 3))] if size and of else []
            row.append(Cell("–" if size is None else format_bytes(size), more=more))
        pair = [points.get((length, model)) for model in ("original", "hybrid")]
        for field in ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_peak_bytes"):
            form = format_bytes if field.endswith("bytes") else format_count
            texts = [
                "–" if point is None else "out of memory" if point.out_of_memory
                else form(getattr(point, field))
                for point in pair
            ]  # fmt: skip
            row += [" → ".join(texts) if any(pair) else "–"] if points else []
        rows.append(row)
    header = ["context", "KV cache in generate, original", "hybrid", "in vLLM, original", "hybrid"]
    title = ""
    if efficiency is not None:
        header += ["prefill, tokens/s", "decoding, tokens/s", "peak memory"]
        title = f"Speed and memory measured on {efficiency.machine}"
    return Table(title, header, [Group(rows)], text_columns=0)


def provenance(config: StageConfig[ReportConfig], results: Results) -> str:
    """The resolved recipe, the text of the evaluation and the versions of packages, as YAML."""
    versions: dict[str, str] = {}
    for manifest in results.manifests.values():
        for name, version in manifest.packages.items():
            known = versions.setdefault(name, version)
            if version not in known.split(", "):
                versions[name] = f"{known}, {version}"
    facts = {
        "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        **{key: section.model_dump(mode="json") for key, section in config.upstream.items()},
        "text of the evaluation": results.main.scores.corpus or {},
        "packages": versions,
    }
    return yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).replace(f"{CHECKOUT}/", "")


def _facts(manifest: Manifest) -> str:
    facts = [format_seconds(manifest.seconds)]
    if manifest.gpu_hours:
        facts.append(f"{manifest.gpu_hours:,.2f} GPU hours on {manifest.gpus} GPUs")
    facts.append(f"key {manifest.key[:12]}")
    if manifest.git_commit:
        changed = ", with local changes" if manifest.git_commit.endswith("+") else ""
        facts.append(f"commit {manifest.git_commit[:12]}{changed}")
    return ", ".join([*facts, *([manifest.created] if manifest.created else [])])
