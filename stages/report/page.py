"""The report's tiles and tables, and its page (page.html)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bosch.front import Front
from bosch.model.cache_size import CacheSize
from bosch.search.methods import METHODS
from stages.evaluate.scores import (
    ABOUT_MARKS,
    FAILED_MODELS,
    HYBRID,
    ORIGINAL,
    MeanScore,
    SuiteScores,
    mark,
    power,
)
from stages.evaluate.suites import suite_title
from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_money,
    format_score,
    format_seconds,
    format_share,
    signed,
)
from stages.materialize.stage import BudgetedCache
from stages.pages.page import render
from stages.pages.tables import Cell, Group, Table
from stages.report import charts
from stages.report.decision import comparisons, headline
from stages.report.predictions import anchor, samples_by_model
from stages.report.provenance import Provenance
from stages.report.results import (
    NEEDLE,
    SHOWN_SAMPLES,
    NeedleScores,
    Results,
    label_of,
)
from stages.report.stage import ReportConfig
from stages.report.verdict import Difference, differences, final_model, kind_of, verdict
from stages.search.charts import front_picture, trace

_TEMPLATE = "stages/report/page.html"


class SuitePart(NamedTuple):
    """A suite's part of the page: its tables, and notes about missing scores."""

    title: str
    tables: list[Table]
    missing: list[str]


class Tile(NamedTuple):
    """One headline number with a link to `target`; `more` explains it, or why there is none."""

    name: str
    value: str
    more: str
    unit: str = ""
    colour: str = ""
    target: str = ""


def page(results: Results, provenance: Provenance, section: ReportConfig) -> str:
    """The self-contained page, from the headline numbers down to their provenance."""
    mask, scores = results.search.mask, results.scores
    traces = [
        trace(results.search.summary, mask.mask.key, name) for name in ("score", "log_likelihood")
    ]
    training = [step for step in results.training if step.loss is not None]
    return render(
        _TEMPLATE, title=provenance.title, subtitle=provenance.subtitle, results=results,
        provenance=provenance, headline=headline(results, section), verdict=verdict(results),
        comparisons=comparisons(results), words=glossary(results), speed=speed_table(results),
        missing=scores.notes(NEEDLE, FAILED_MODELS), tiles=list(_tiles(results)),
        why_no_score=_why_no_score(results, is_trained=False), averages=charts.averages(results),
        share=format_share(results.search.sliding / results.search.total),
        against_original=charts.against_original(results), mask=charts.head_mask(results.search),
        front=front_picture(results.search.front) if results.search.front else None,
        front_table=front_table(results.search.front) if results.search.front else None,
        traces=[picture for picture in traces if picture is not None],
        layers=charts.layer_importance(results.search), search_facts=_search_facts(results),
        recovery=charts.recovery(results) if results.needle else None,
        loss=charts.training_loss(training, results.loss_in_words) if training else None,
        score_tables=[score_table(scored) for scored in [*results.needle, *results.rivals]],
        about_marks=ABOUT_MARKS, filters=filters(scores.checkpoints.values()),
        other_suites=other_suites(results), positions=charts.positions(results),
        cache=charts.cache_by_length(results.cache), cache_table=cache_table(results.cache),
        lengths=charts.document_lengths(results.statistics),
        predictions=samples_by_model(results.predictions), shown_samples=SHOWN_SAMPLES,
        time=charts.stage_times(results.stage_seconds) if results.stage_seconds else None,
        costs=cost_table(results, section.gpu_hour_price, section.currency),
    )  # fmt: skip


def _tiles(results: Results) -> Iterable[Tile]:
    yield _score_tile("Original model", ORIGINAL, results, "original")
    yield _score_tile("Hybrid, untrained", HYBRID, results, "untrained")
    yield _score_tile("Hybrid, trained", results.scores.last_trained, results, "hybrid")
    model = final_model(results)
    for row in differences(results, model):
        if row.name != suite_title(NEEDLE):  # the needle scores have their tiles above
            value = signed(row.mean, 1 if row.unit == "points" else 2)
            more = f"against the original, 95 % interval {row.text.partition(' ')[2]}"
            colour = "untrained" if model == HYBRID else "hybrid"
            yield Tile(f"{row.name}, {kind_of(model)}", value, more, row.unit, colour)
    search, cache = results.search, results.cache
    compared = [(p.length, p.over_original) for p in results.measured_points if p.over_original]
    for length, over in compared[-1:]:
        value = f"{over.prefill_tokens_per_second:.2f} and {over.decode_tokens_per_second:.2f}"
        more = f"prefill and decoding, times the original's at {format_length(length)}"
        yield Tile("Measured speed", value, more, "×")
    value = f"{format_bytes(cache.original_per_token)} → {format_bytes(cache.per_token)}"
    windows = f"and at most {format_bytes(cache.sliding_bytes)} for the windows"
    yield Tile("KV cache per token", value, windows)
    if (budget := results.materialized.budget) is not None:
        value = f"{format_bytes(budget.original)} → {format_bytes(budget.bytes)}"
        yield Tile(f"KV cache at {format_length(budget.tokens)}", value, budget_text(budget))
    heads = f"{search.sliding} of {search.total} KV heads"
    yield Tile("Sliding KV heads (ρ)", format_share(search.sliding / search.total), heads)
    sinks = search.mask.sinks
    reach = f"and {sinks} sink tokens" if sinks else "the token itself included"
    plural = "s" if len(search.windows) > 1 else ""
    yield Tile(f"Window{plural} (W)", search.window_sizes, reach, "tokens")


def _score_tile(name: str, model: str | None, results: Results, colour: str) -> Tile:
    scores, failed = results.checkpoint(model), results.scores.failed_models
    if scores is None:
        if model in failed:
            return Tile(name, "", f"Could not be evaluated: {failed[model]}.")
        return Tile(name, "", _why_no_score(results, is_trained=colour == "hybrid"))
    suite = scores.suite
    more = f"needle average over {suite.samples:,} samples"
    if suite.against_original is not None:
        change = Difference.of_scores("", suite.against_original).text
        more = f"needle average, {change} against the original"
    elif suite.low is not None:
        more += f", 95 % interval {format_score(suite.low)} to {format_score(suite.high)}"
    if scores.tokens:
        more += f", after {format_count(scores.tokens)} tokens"
    average = format_score(scores.average)
    return Tile(name, average, more, "of 100", colour, f"#{anchor(scores.name)}")


def _why_no_score(results: Results, *, is_trained: bool) -> str:
    if is_trained and "train" not in results.present:
        return "Training is not part of this recipe."
    if "evaluate" not in results.present:
        return "Evaluation is not part of this recipe."
    if not results.needle:
        return "This recipe's evaluation has no needle tasks."
    return "Not among the evaluated checkpoints."


_NATS = ("nats", "the unit of loss: at +0.1 the right token is about a tenth less probable")


def glossary(results: Results) -> list[tuple[str, str]]:
    """Terms of the page's first screen with their meanings."""
    names = dict.fromkeys([results.search.mask.method, *(rival.method for rival in results.rivals)])
    return [
        *((METHODS[name].label, METHODS[name].about) for name in names),
        ("ρ", "the share of the KV heads that slide: they see only a window"),
        ("W", "the window: the last tokens that a sliding head sees"),
        *([_NATS] if results.document_count else []),
    ]


def speed_table(results: Results) -> Table | None:
    """Measured speed, memory and cache of both models at each length; None without measurement.

    The title names the precision, which may differ from that of the section "KV cache".
    """
    if results.efficiency is None:
        return None
    rows = []
    for point in results.efficiency.points:
        values = (point.prefill_tokens_per_second, point.decode_tokens_per_second)
        sizes = (point.memory_peak_bytes, point.kv_cache_bytes)
        name = [format_length(point.length), point.model]
        if point.out_of_memory:
            name[1] += ", out of memory"
        rows.append([*name, *(_or_dash(v, format_count) for v in values),
                     *(_or_dash(size, format_bytes) for size in sizes)])  # fmt: skip
    header = ("context (tokens)", "model", "prefill, tokens/s", "decoding, tokens/s",
              "peak memory", "KV cache")  # fmt: skip
    settings, title = results.efficiency.settings, f"Measured on {results.efficiency.machine}"
    if dtype := settings.get("dtype"):
        title += f" in {dtype}"
    if (sequences := settings.get("batch_size", 1)) > 1:
        title += f", {sequences} sequences together"
    return Table(title, header, [Group(rows)])


def _search_facts(results: Results) -> list[tuple[str, str]]:
    summary = results.search.summary
    anchors, gradients = summary.anchors, summary.gradients
    score, log_likelihood = results.search.score_and_log_likelihood
    return [
        ("Method", results.search.mask.method),
        ("Anchor, every head sliding", format_share(anchors.all_sliding)),
        ("Anchor, every head full", format_share(anchors.all_full)),
        ("Score of the final mask", format_share(score)),
        ("Log-likelihood of the final mask", f"{log_likelihood:,.4g} nats"),
        ("Masks evaluated", f"{summary.evaluations:,}"),
        *([("Gradients taken", f"{gradients:,}")] if gradients else []),
        ("Model work", f"{summary.full_forward_equivalents:,.1f} full passes over D"),
        ("Time in the model", format_seconds(summary.model_seconds)),
        ("Time in the solver", format_seconds(summary.solver_seconds)),
    ]  # fmt: skip


def filters(models: Iterable[Mapping[str, SuiteScores]]) -> dict[str, list[str]]:
    """Tasks and lengths that have a score, for the page's filter."""
    tables = [suite.tasks for suites in models for suite in suites.values()]
    tasks = dict.fromkeys(task for table in tables for task in table)
    lengths = set().union(*(scores for table in tables for scores in table.values()))
    return {
        "task": list(tasks),
        "length": [format_length(length) for length in sorted(lengths) if length],
    }


def other_suites(results: Results) -> list[SuitePart]:
    """The suites without charts."""
    scores = results.scores
    names = [*itertools.chain(*scores.checkpoints.values()), *scores.missing]
    parts = []
    for name in dict.fromkeys(names):
        if name in (NEEDLE, FAILED_MODELS):
            continue
        by_model = {
            model: suites[name] for model, suites in scores.checkpoints.items() if name in suites
        }
        tables = [score_table(NeedleScores(*item), name) for item in by_model.items()]
        if set().union(*map(_lengths, by_model.values())) == {0}:
            tables = [task_table(name, by_model)]
        parts.append(SuitePart(suite_title(name), tables, scores.notes(name)))
    return parts


def score_table(scores: NeedleScores, name: str = NEEDLE) -> Table:
    """Tasks by lengths of one checkpoint, each cell tinted by its score and with its interval."""
    suite = scores.suite
    lengths = sorted(_lengths(suite))
    header = ["task", *(Cell(format_length(at), length=format_length(at)) for at in lengths)]
    rows = [
        [Cell(task, task=task)]
        + [_score(by_length.get(at), anchor(scores.name, name, task, at)) for at in lengths]
        for task, by_length in suite.tasks.items()
    ]
    groups = [Group(rows)]
    if suite.by_length:
        means = [_score(suite.by_length.get(at), anchor(scores.name)) for at in lengths]
        groups.append(Group([["all tasks", *means]], is_total=True))
    note = f"average {format_score(scores.average)}{power(suite.against_original)}"
    return Table(scores.label, header, groups, note=note)


def _lengths(suite: SuiteScores) -> set[int]:
    return set().union(*suite.tasks.values())


def _score(score: MeanScore | None, target: str) -> Cell:
    if score is None:
        return Cell(format_score(None), share=0.0)
    text = mark(score.against_original) + format_score(score.score)
    interval = f"{format_score(score.low)}–{format_score(score.high)}"
    return Cell(text, target=f"#{target}", more=[(interval, "")], share=score.score / 100)


def task_table(name: str, suites: Mapping[str, SuiteScores]) -> Table:
    """Tasks without lengths, and averages of groups, of each model in the suite `name`."""
    rows = []
    for task in dict.fromkeys(task for suite in suites.values() for task in suite.tasks):
        scores = {model: suite.tasks.get(task, {}).get(0) for model, suite in suites.items()}
        cells = [_score(score, anchor(model, name, task, 0)) for model, score in scores.items()]
        rows.append([Cell(task, task=task), *cells])
    totals = []
    for group in dict.fromkeys(group for suite in suites.values() for group in suite.groups):
        means = {model: suite.groups.get(group) for model, suite in suites.items()}
        largest = max((mean for mean in means.values() if mean), key=lambda mean: len(mean.tasks))
        label = f"{group} ({len(largest.tasks)} of {largest.of} tasks)"
        totals.append([label, *(_score(mean, anchor(model)) for model, mean in means.items())])
    header = ["task", *(label_of(name) for name in suites)]
    return Table("", header, [Group(rows), Group(totals, is_total=True)])


def budget_text(budget: BudgetedCache) -> str:
    """The cache's share of the original's, and the budget."""
    text = f"{budget.bytes / budget.original:.1%} of the original's"
    if budget.allowed is None:
        return text
    return f"{text}, within the {format_bytes(budget.allowed)} of the budget"


def front_table(front: Front) -> Table:
    """The points of a front with their caches and scores."""
    rows = []
    for index, point in enumerate(front.points):
        held_out = _or_dash(point.held_out_score, "{:.3f}".format)
        if point.held_out_score is not None:
            held_out += f" ({point.held_out_low:.3f} to {point.held_out_high:.3f})"
        rows.append(
            (
                f"{index + 1}{', chosen' if index == front.chosen else ''}",
                f"{point.kv_slots:,}",
                _or_dash(point.bytes, format_bytes),
                f"{point.kv_slots / front.points[-1].kv_slots:.1%}",
                str(point.full_kv_heads),
                f"{front.mask(index).swa_ratio:.3f}",
                f"{point.score:.3f}",
                held_out,
            )
        )
    title = (
        f"Points of the front at {front.context:,} tokens; held-out scores with one-sided limits"
    )
    header = ("point", "KV slots", "KV cache", "share", "full heads", "ρ", "score", "held out")
    return Table.of_rows(title, header, rows)


def cache_table(cache: CacheSize) -> Table:
    """Cache bytes of one sequence at some context lengths, and of each further token."""
    sizes = [
        (format_length(at), cache.original(at), cache.dynamic(at))
        for at in charts.cache_lengths(cache)[::2]
    ]
    sizes.append(("each further token", cache.original_per_token, cache.per_token))
    rows = [(length, *_sizes(original, hybrid)) for length, original, hybrid in sizes]
    header = ("context (tokens)", "original", "hybrid", "share")
    return Table.of_rows("Computed from the head mask, not measured", header, rows)


def _sizes(original: float, hybrid: float) -> list[str]:
    return [format_bytes(original), format_bytes(hybrid), f"{hybrid / original:.0%}"]


def cost_table(results: Results, price: float | None, currency: str) -> Table | None:
    """GPU hours of each stage and their cost at `price` an hour; None without GPUs."""
    if not results.total_gpu_hours:
        return None
    seconds = dict(results.stage_seconds)

    def cost(hours: float) -> list[str]:
        amounts = [hours] if price is None else [hours, hours * price]
        return [f"{amount:,.2f}" for amount in amounts]

    rows = [
        [stage, format_seconds(seconds[stage]), str(manifest.gpus), *cost(manifest.gpu_hours)]
        for stage, manifest in results.manifests.items()
    ]
    total = ["together", format_seconds(sum(seconds.values())), "", *cost(results.total_gpu_hours)]
    title = "GPU hours" if price is None else f"GPU hours, at {format_money(price, currency)} each"
    header = ["stage", "wall time", "GPUs", "GPU hours", *([] if price is None else [currency])]
    return Table(title, header, [Group(rows), Group([total], is_total=True)])


def _or_dash(value: float | None, form: object) -> str:
    return "–" if value is None else str(form(value))  # type: ignore[operator]
