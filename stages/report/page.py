"""The report as one HTML page, from the headline numbers down to their provenance."""

from __future__ import annotations

from functools import partial
from html import escape

from bosch.model.cache_size import CacheSize
from bosch.vllm.plan import CPU, LARGE_GPU, engine_heads, served_caches, served_tokens
from stages.evaluate.scores import HYBRID, ORIGINAL
from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_money,
    format_score,
    format_seconds,
    format_share,
)
from stages.report import figures, markup
from stages.report.charts import STYLE
from stages.report.predictions import anchor, predictions_section
from stages.report.provenance import Provenance, provenance_section
from stages.report.results import Results
from stages.report.scores_section import (
    HARNESS,
    harness_section,
    positions_section,
    scores_section,
    standing_section,
    windows_section,
)
from stages.report.search_section import mask_section, search_section
from stages.report.stage import ReportConfig
from stages.report.verdict import (
    Difference,
    difference_tiles,
    differences_section,
    verdict_section,
)

NO_TRAIN = "Training is not part of this recipe."
NO_EVALUATE = "Evaluation is not part of this recipe."
NO_NEEDLE = "This recipe's evaluation has no needle tasks."


def render(results: Results, provenance: Provenance, section: ReportConfig) -> str:
    """The self-contained page."""
    sections = [
        verdict_section(results),
        _missing_section(results),
        standing_section(results),
        _tiles(results),
        differences_section(results),
        mask_section(results),
        search_section(results),
        _recovery_section(results),
        scores_section(results, _why_no_score(results, trained=False)),
        windows_section(results),
        harness_section(results),
        positions_section(results),
        _memory_section(results),
        _data_section(results),
        predictions_section(results.predictions),
        _time_section(results, section),
        provenance_section(provenance),
    ]
    header = f"<h1>{escape(provenance.title)}</h1><p>{escape(provenance.subtitle)}</p>"
    return markup.page(
        provenance.title,
        STYLE,
        header,
        "".join(sections),
        "Written by BOSCH-pipeline. The page is self-contained and loads nothing.",
    )


def _missing_section(results: Results) -> str:
    """Models and tasks without a score, but for other tasks, which have their own section."""
    scores = results.scores
    return markup.notes(scores.missing_sentences(HARNESS)) if scores is not None else ""


def _tiles(results: Results) -> str:
    trained = results.scores.last_trained if results.scores is not None else None
    tiles = [
        _score_tile("Original model", ORIGINAL, results, "original"),
        _score_tile("Hybrid, untrained", HYBRID, results, "untrained"),
        _score_tile("Hybrid, trained", trained, results, "hybrid"),
    ]
    tiles += difference_tiles(results)
    search, cache = results.search, results.cache
    value = f"{format_bytes(cache.original_per_token)} → {format_bytes(cache.per_token)}"
    windows = f"and at most {format_bytes(cache.windows)} for the windows"
    heads = f"{search.sliding} of {search.total} KV heads"
    sinks = search.mask.sinks
    reach = f"and {sinks} sink tokens" if sinks else "the token itself included"
    several = "s" if len(search.mask.windows) > 1 else ""
    tiles += [
        markup.tile("KV cache per token", value, windows),
        markup.tile("Sliding KV heads (ρ)", format_share(search.sliding / search.total), heads),
        markup.tile(f"Window{several} (W)", search.window_sizes, reach, "tokens"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _score_tile(
    name: str,
    model: str | None,
    results: Results,
    colour: str,
) -> str:
    scores = results.checkpoint(model) if model is not None else None
    if scores is None:
        failed = results.scores.failed_models if results.scores is not None else {}
        if model in failed:
            return markup.empty_tile(name, f"Could not be evaluated: {failed[model]}.")
        return markup.empty_tile(name, _why_no_score(results, trained=colour == "hybrid"))
    more = f"needle average over {scores.suite.samples:,} samples"
    against = scores.suite.against_original
    if against is not None:
        change = Difference.of_scores("", against).text
        more = f"needle average, {change} against the original"
    elif scores.suite.low is not None:
        low, high = format_score(scores.suite.low), format_score(scores.suite.high)
        more += f", 95 % interval {low} to {high}"
    if scores.tokens:
        more += f", after {format_count(scores.tokens)} tokens"
    average = format_score(scores.average)
    return markup.tile(name, average, more, "of 100", colour, f"#{anchor(scores.name)}")


def _why_no_score(results: Results, trained: bool) -> str:
    if trained and "train" not in results.present:
        return NO_TRAIN
    if "evaluate" not in results.present:
        return NO_EVALUATE
    if results.needle is None:
        return NO_NEEDLE
    return "Not among the evaluated checkpoints."


def _recovery_section(results: Results) -> str:
    lead = "Long-context quality over continual pretraining."
    cards = []
    if results.needle is None:
        cards.append(markup.absent(_why_no_score(results, trained=False)))
    else:
        keys = [
            ("stroke dashed", "original", "original"),
            ("square", "untrained", "hybrid, untrained"),
            ("round", "hybrid", "hybrid, trained"),
        ]
        inner = figures.responsive(
            partial(figures.recovery, results.needle), "recovery", figures.HALF
        )
        cards.append(
            markup.card(markup.legend(keys) + inner, "Needle average over training tokens")
        )
    training = [step for step in results.training or [] if step.loss is not None]
    if not training:
        cards.append(markup.absent(NO_TRAIN))
    else:
        keys = [("stroke", "hybrid", "running mean, each logged step behind it")]
        inner = figures.responsive(partial(figures.training_loss, training), "loss", figures.HALF)
        cards.append(markup.card(markup.legend(keys) + inner, "Training loss"))
    return markup.section("Recovery", lead, markup.grid(cards))


def _memory_section(results: Results) -> str:
    lead = "A full head's cache grows with every token; a sliding head's stops at its window."
    cache = results.cache
    keys = [("stroke dashed", "original", "original"), ("stroke", "hybrid", "hybrid")]
    inner = figures.responsive(partial(figures.cache_by_length, cache), "cache", figures.HALF)
    cards = [
        markup.card(markup.legend(keys) + inner, "Cache of one sequence"),
        markup.card(cache_table(cache)),
        markup.card(served_table(results)),
    ]
    return markup.section("KV cache", lead, markup.grid(cards))


def served_table(results: Results) -> str:
    """What vLLM holds per request on each tensor-parallel rank, by the modules of its plugin."""
    file = results.search.mask
    title = "One request in vLLM, on each tensor-parallel rank; computed, not measured"
    if file.sinks:
        return f"<p>{title}: not served, because vLLM has no sinks of a sliding head.</p>"
    cache, heads = results.cache, file.num_key_value_heads
    other = any(o.bytes_per_head != cache.bytes_per_head or o.heads % heads for o in cache.own)
    if cache.state_bytes or other:
        return f"<p>{title}: not served by the plugin, because of layers of other kinds.</p>"
    rows = [
        (
            served.engine.name,
            str(served.ranks),
            format_length(served.tokens),
            *(
                (served.refusal, "", "")
                if served.refusal
                else (
                    format_bytes(served.original),
                    format_bytes(served.hybrid),
                    f"{served.hybrid / served.original:.0%}",
                )
            ),
        )
        for engine in (LARGE_GPU, CPU)
        for served in served_caches(
            engine_heads(file.mask.heads_per_layer(file.windows)),
            cache.bytes_per_head,
            [own.window for own in cache.own for _ in range(own.heads // heads)],
            engine=engine,
            lengths=served_tokens(results.positions),
        )
        if engine is LARGE_GPU or served.ranks == 1
    ]
    return markup.table(
        title, ("engine on", "ranks", "context (tokens)", "original", "hybrid", "share"), rows
    )


def cache_table(cache: CacheSize) -> str:
    """Bytes per token, and bytes of one sequence at some context lengths."""
    rows = [
        (
            format_length(length),
            format_bytes(cache.original(length)),
            format_bytes(cache.dynamic(length)),
            f"{cache.dynamic(length) / cache.original(length):.0%}",
        )
        for length in figures.cache_lengths(cache)[::2]
    ]
    rows.append(
        (
            "each further token",
            format_bytes(cache.original_per_token),
            format_bytes(cache.per_token),
            f"{cache.per_token / cache.original_per_token:.0%}",
        )
    )
    return markup.table(
        "Computed from the head mask, not measured",
        ("context (tokens)", "original", "hybrid", "share"),
        rows,
    )


def _data_section(results: Results) -> str:
    lead = "Documents of the training data by their length, as shares of their source's tokens."
    sources = results.statistics.get("sources", {})
    lengths = [(name, one["lengths"]) for name, one in sources.items() if one.get("lengths")]
    if not lengths:
        absent = markup.absent("The prepared data's statistics hold no lengths.")
        return markup.section("Training data", lead, absent)
    picture = figures.responsive(partial(figures.document_lengths, lengths), "lengths")
    return markup.section("Training data", lead, markup.card(picture))


def _time_section(results: Results, section: ReportConfig) -> str:
    heading = "Time and cost"
    lead = "Wall time of each stage. Stages that are cached are not run again."
    seconds = results.stage_seconds
    if not seconds:
        return markup.section(heading, lead, markup.absent("No stage recorded its time."))
    picture = figures.responsive(partial(figures.stage_times, seconds), "time")
    if results.total_gpu_hours:
        cost = markup.card(cost_table(results, section.gpu_hour_price, section.currency))
    else:
        cost = markup.absent("No stage recorded that it ran on a GPU: there are no GPU hours.")
    return markup.section(heading, lead, markup.card(picture) + cost)


def cost_table(results: Results, price: float | None, currency: str) -> str:
    """GPU hours of each stage, wall time by its GPUs, and what they cost at `price` an hour."""
    hours, seconds = results.gpu_hours, dict(results.stage_seconds)
    counts = {stage: manifest.gpus for stage, manifest in results.manifests.items()}
    rows = [
        (stage, format_seconds(seconds[stage]), _count(counts[stage]), *_cost(hours[stage], price))
        for stage in seconds
    ]
    total = results.total_gpu_hours
    rows.append(("together", format_seconds(sum(seconds.values())), "", *_cost(total, price)))
    if price is None:
        return markup.table("GPU hours", ("stage", "wall time", "GPUs", "GPU hours"), rows)
    caption = f"GPU hours, at {format_money(price, currency)} each"
    return markup.table(caption, ("stage", "wall time", "GPUs", "GPU hours", currency), rows)


def _count(gpus: int | None) -> str:
    return "not recorded" if gpus is None else str(gpus)


def _cost(hours: float | None, price: float | None) -> list[str]:
    cells = ["–" if hours is None else f"{hours:,.2f}"]
    if price is not None:
        cells.append("–" if hours is None else f"{hours * price:,.2f}")
    return cells
