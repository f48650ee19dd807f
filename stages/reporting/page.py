"""The report as one HTML page, from the headline numbers down to their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from stages.reporting import figures, markup
from stages.reporting.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_share,
)
from stages.reporting.provenance import Provenance, provenance_section
from stages.reporting.results import Cache, NeedleScores, Results
from stages.reporting.search_section import NO_SEARCH, mask_section, search_section

NO_TRAIN = "Training is not part of this recipe."
NO_EVALUATE = "Evaluation is not part of this recipe."
NO_NEEDLE = "This recipe's evaluation has no needle tasks."
NO_MATERIALIZE = "Materialising the hybrid model is not part of this recipe."


def render(results: Results, provenance: Provenance) -> str:
    """The self-contained page."""
    sections = [
        _tiles(results),
        mask_section(results),
        search_section(results),
        _recovery_section(results),
        _scores_section(results),
        _memory_section(results),
        _time_section(results),
        provenance_section(provenance),
    ]
    header = f"<h1>{escape(provenance.title)}</h1><p>{escape(provenance.subtitle)}</p>"
    return markup.page(
        provenance.title,
        (Path(__file__).with_name("page.css")).read_text(encoding="utf-8"),
        header,
        "".join(sections),
        "Made by BOSCH-pipeline. The page needs no network and carries all it shows.",
    )


def _tiles(results: Results) -> str:
    tiles = [
        _score_tile("Original model", results.checkpoint("original"), None, results, "original"),
        _score_tile(
            "Hybrid, untrained",
            results.checkpoint("hybrid"),
            results.checkpoint("original"),
            results,
            "untrained",
        ),
        _score_tile(
            "Hybrid, trained", results.trained, results.checkpoint("original"), results, "hybrid"
        ),
    ]
    search, cache = results.search, results.cache
    if cache is None:
        text = NO_MATERIALIZE if "materialize" not in results.present else NO_SEARCH
        tiles.append(markup.empty_tile("KV cache per token", text))
    else:
        value = f"{format_bytes(cache.before_per_token)} → {format_bytes(cache.after_per_token)}"
        more = f"and at most {format_bytes(cache.window_bytes)} for the windows"
        tiles.append(markup.tile("KV cache per token", value, more))
    if search is None:
        tiles.append(markup.empty_tile("Sliding KV heads (ρ)", NO_SEARCH))
    else:
        share = format_share(search.sliding / search.total)
        more = f"{search.sliding} of {search.total} KV heads"
        tiles.append(markup.tile("Sliding KV heads (ρ)", share, more))
        more = f"and {search.sinks} sink tokens" if search.sinks else "the token itself included"
        tiles.append(markup.tile("Window (W)", f"{search.window_size:,}", more, "tokens"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _score_tile(
    name: str,
    scores: NeedleScores | None,
    original: NeedleScores | None,
    results: Results,
    colour: str,
) -> str:
    if scores is None:
        return markup.empty_tile(name, _why_no_score(results, trained=colour == "hybrid"))
    more = f"needle average over {scores.samples:,} samples"
    if original is not None:
        more = f"needle average, {_change(scores.average - original.average)}"
    if scores.standard_error is not None:
        more += f", standard error {format_score(scores.standard_error)}"
    if scores.tokens:
        more += f", after {format_count(scores.tokens)} tokens"
    return markup.tile(name, format_score(scores.average), more, "of 100", colour)


def _change(points: float) -> str:
    if abs(points) < 0.05:
        return "as the original"
    return f"{points:+.1f} against the original".replace("-", "−")


def _why_no_score(results: Results, trained: bool) -> str:
    if trained and "train" not in results.present:
        return NO_TRAIN
    if "evaluate" not in results.present:
        return NO_EVALUATE
    if results.needle is None:
        return NO_NEEDLE
    return "Not among the evaluated checkpoints."


def _recovery_section(results: Results) -> str:
    lead = "What continual pretraining brings back."
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
    training = results.training
    if training is None:
        cards.append(markup.absent(NO_TRAIN))
    elif not training.points:
        cards.append(markup.absent("Training logged no finite loss."))
    else:
        keys = [("stroke", "hybrid", "running mean, each logged step behind it")]
        inner = figures.responsive(partial(figures.training_loss, training), "loss", figures.HALF)
        lost = len(training.metrics) - len(training.points)
        if lost:
            inner += markup.notes([f"The loss of {lost:,} logged steps is not finite, not drawn."])
        cards.append(markup.card(markup.legend(keys) + inner, "Training loss"))
    return markup.section("Recovery", lead, markup.grid(cards))


def _scores_section(results: Results) -> str:
    lead = "Needle tasks by context length, in points of 100."
    if results.needle is None:
        text = _why_no_score(results, trained=False)
        return markup.section("Scores by task and length", lead, markup.absent(text))
    cards = [markup.card(score_table(scores)) for scores in results.needle]
    return markup.section("Scores by task and length", lead, markup.grid(cards))


def score_table(scores: NeedleScores) -> str:
    """Tasks by lengths of one checkpoint, each cell tinted by its score."""
    lengths = sorted({length for by in scores.tasks.values() for length in by})
    head = "".join(f'<th scope="col">{format_length(length)}</th>' for length in lengths)
    rows = [
        _score_row(task, [by.get(length) for length in lengths])
        for task, by in scores.tasks.items()
    ]
    by_length: list[float | None] = [scores.by_length.get(length) for length in lengths]
    if any(value is not None for value in by_length):
        rows.append(_score_row("all tasks", by_length, "total"))
    caption = f"{escape(scores.label)} <span>average {format_score(scores.average)}</span>"
    return (
        f'<div class="scroll"><table><caption>{caption}</caption><thead><tr>'
        f'<th scope="col">task</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _score_row(name: str, values: Sequence[float | None], css: str = "") -> str:
    cells = "".join(
        f'<td class="score" style="--share:{(value or 0) / 100:.3f}">{format_score(value)}</td>'
        for value in values
    )
    return f'<tr class="{css}"><th scope="row">{escape(name)}</th>{cells}</tr>'


def _memory_section(results: Results) -> str:
    lead = "A full head's cache grows with every token; a sliding head's stops at its window."
    cache = results.cache
    if cache is None:
        text = NO_MATERIALIZE if "materialize" not in results.present else NO_SEARCH
        return markup.section("KV cache", lead, markup.absent(text))
    keys = [("stroke dashed", "original", "original"), ("stroke", "hybrid", "hybrid")]
    inner = figures.responsive(partial(figures.cache_by_length, cache), "cache", figures.HALF)
    cards = [
        markup.card(markup.legend(keys) + inner, "Cache of one sequence"),
        markup.card(cache_table(cache)),
    ]
    return markup.section("KV cache", lead, markup.grid(cards))


def cache_table(cache: Cache) -> str:
    """Bytes per token, and bytes of one sequence at some context lengths."""
    rows = [
        (
            format_length(length),
            format_bytes(cache.before(length)),
            format_bytes(cache.after(length)),
            f"{cache.after(length) / cache.before(length):.0%}",
        )
        for length in figures.cache_lengths(cache)[::2]
    ]
    rows.append(
        (
            "each further token",
            format_bytes(cache.before_per_token),
            format_bytes(cache.after_per_token),
            f"{cache.after_per_token / cache.before_per_token:.0%}",
        )
    )
    return markup.table(
        "Computed from the head mask, not measured",
        ("context (tokens)", "original", "hybrid", "share"),
        rows,
    )


def _time_section(results: Results) -> str:
    lead = "Wall time of each stage when its output was made; a cached stage costs nothing again."
    seconds = results.stage_seconds
    if not seconds:
        return markup.section("Time", lead, markup.absent("No stage recorded its time."))
    picture = figures.responsive(partial(figures.stage_times, seconds), "time")
    return markup.section("Time", lead, markup.card(picture))
