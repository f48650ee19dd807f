"""The report as one HTML page, from the headline numbers down to their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from stages.reporting import figures, markup, search_figures
from stages.reporting.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
    format_share,
)
from stages.reporting.provenance import Provenance, provenance_section
from stages.reporting.results import Cache, NeedleScores, Results, Search

NO_SEARCH = "A search is not part of this recipe."
NO_TRAIN = "Training is not part of this recipe."
NO_EVALUATE = "Evaluation is not part of this recipe."
NO_NEEDLE = "This recipe's evaluation has no needle tasks."
NO_MATERIALIZE = "Materialising the hybrid model is not part of this recipe."


def render(results: Results, provenance: Provenance) -> str:
    """The self-contained page."""
    sections = [
        _tiles(results),
        _mask_section(results),
        _search_section(results),
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


def _mask_section(results: Results) -> str:
    search = results.search
    lead = "Which KV heads keep attending to everything and which see only their window."
    if search is None:
        return markup.section("Head mask", lead, markup.absent(NO_SEARCH))
    keys = [
        ("", "full", f"full attention ({search.total - search.sliding})"),
        ("", "sliding", f"sliding window ({search.sliding})"),
    ]
    picture = figures.responsive(partial(search_figures.head_mask, search), "mask")
    return markup.section("Head mask", lead, markup.card(markup.legend(keys) + picture))


def _search_section(results: Results) -> str:
    search = results.search
    lead = "How the mask was found: what was evaluated, and what it said about each layer."
    if search is None:
        return markup.section("Search", lead, markup.absent(NO_SEARCH))
    inner = markup.notes(search.summary.get("notes", []))
    inner += _trace_cards(search) + _layer_cards(search) + markup.card(_search_facts(search))
    return markup.section("Search", lead, inner)


TRACE_KEYS = (
    ("anchors", "round", "anchor", "anchors, final mask"),
    ("layer_importance", "round", "stage1", "stage 1, layer importance"),
    ("head_selection", "box", "stage3", "stage 3, head selection"),
)


def _trace_cards(search: Search) -> str:
    if not search.summary.get("trace"):
        text = f"Method {search.mask.get('method', '')} makes its mask without evaluating any."
        return markup.absent(text)
    met = {row["stage"] for row in search.summary["trace"]}
    keys = [key for stage, *key in TRACE_KEYS if stage in met]
    best = ("stroke", "ink", "best so far in the sub-problem")
    score = markup.legend([*keys, best]) + _trace(search, "score", "trace")
    inner = markup.card(score, "Score over evaluations")
    if any(row.get("log_likelihood") is not None for row in search.summary["trace"]):
        likelihood = markup.legend(keys) + _trace(search, "log_likelihood", "trace-ll")
        inner += markup.card(likelihood, "Log-likelihood of the answers over evaluations")
    return inner


def _trace(search: Search, quantity: str, name: str) -> str:
    return figures.responsive(partial(search_figures.search_trace, search, quantity), name)


LAYER_PANELS = (
    ("best_score", "Best score", "score", True, "Score once this layer and those above slide"),
    ("drop", "Added drop d", "drop", False, "Drop added by this layer, relative to the original"),
    ("weight", "Weight w", "weight", True, "Weight: the larger, the harder to localise"),
    ("ratio", "SWA ratio", "ratio", True, "Assigned share of sliding heads"),
)


def _layer_cards(search: Search) -> str:
    if not search.summary.get("layer_importance"):
        text = f"Method {search.mask.get('method', '')} does not probe layers one by one."
        return markup.absent(text)
    cards = []
    for field, label, css, unit, heading in LAYER_PANELS:
        draw = partial(search_figures.layer_panel, search, field, label, css, unit)
        picture = figures.responsive(draw, f"layer-{field}", figures.HALF)
        cards.append(markup.card(picture, heading))
    return markup.grid(cards)


def _search_facts(search: Search) -> str:
    summary = search.summary
    anchors = summary.get("anchors", {})
    rows = [
        ("Method", str(search.mask.get("method", "–"))),
        ("Anchor, every head sliding", _share_or_dash(anchors.get("all_sliding"))),
        ("Anchor, every head full", _share_or_dash(anchors.get("all_full"))),
        ("Score of the mask found", _share_or_dash(summary.get("best_score"))),
        ("Log-likelihood of the mask found", _number(summary.get("best_log_likelihood"), "nats")),
        ("Masks evaluated", _number(summary.get("evaluations"), "")),
        ("Model work", _number(summary.get("full_forward_equivalents"), "full passes over D")),
        (
            "Model work without any reuse",
            _number(summary.get("naive_full_forward_equivalents"), "full passes over D"),
        ),
        ("Time in the model", _duration(summary.get("model_seconds"))),
        ("Time in the solver", _duration(summary.get("solver_seconds"))),
    ]
    return markup.facts(rows)


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


def _share_or_dash(value: float | None) -> str:
    return "–" if value is None else format_share(value)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{text} {unit}".strip()


def _duration(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)
