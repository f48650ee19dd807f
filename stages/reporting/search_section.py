"""What the report says about the search: the head mask, the path to it, and its cost."""

from __future__ import annotations

from functools import partial

from stages.reporting import figures, markup, search_figures
from stages.reporting.formats import format_seconds, format_share
from stages.reporting.results import Results, Search

NO_SEARCH = "A search is not part of this recipe."
TRACE_KEYS = (
    ("anchors", "round", "anchor", "anchors, final mask"),
    ("layer_importance", "round", "stage1", "stage 1, layer importance"),
    ("head_selection", "box", "stage3", "stage 3, head selection"),
    ("start", "round", "stage1", "masks that gradients propose"),
    ("swaps", "box", "stage3", "swaps that were not given up early"),
)
LAYER_PANELS = (
    ("best_score", "Best score", "score", True, "Score once this layer and those above slide"),
    ("drop", "Added drop d", "drop", False, "Drop added by this layer, relative to the original"),
    ("weight", "Weight w", "weight", True, "Weight: the larger, the harder to localise"),
    ("ratio", "SWA ratio", "ratio", True, "Assigned share of sliding heads"),
)


def mask_section(results: Results) -> str:
    """The head mask as a heat map, layers by KV heads."""
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


def search_section(results: Results) -> str:
    """Score over evaluations, what each layer's probe said, and what the search cost."""
    search = results.search
    lead = "How the mask was found: what was evaluated, and what it said about each layer."
    if search is None:
        return markup.section("Search", lead, markup.absent(NO_SEARCH))
    inner = markup.notes(search.summary.get("notes", []))
    inner += _trace_cards(search) + _layer_cards(search) + markup.card(_search_facts(search))
    return markup.section("Search", lead, inner)


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
    anchors, gradients = summary.get("anchors", {}), summary.get("gradients")
    rows = [
        ("Method", str(search.mask.get("method", "–"))),
        ("Anchor, every head sliding", _share_or_dash(anchors.get("all_sliding"))),
        ("Anchor, every head full", _share_or_dash(anchors.get("all_full"))),
        ("Score of the mask found", _share_or_dash(summary.get("best_score"))),
        ("Log-likelihood of the mask found", _number(summary.get("best_log_likelihood"), "nats")),
        ("Masks evaluated", _number(summary.get("evaluations"), "")),
        *([("Gradients taken", _number(gradients, ""))] if gradients else []),
        ("Model work", _number(summary.get("full_forward_equivalents"), "full passes over D")),
        (
            "Model work without any reuse",
            _number(summary.get("naive_full_forward_equivalents"), "full passes over D"),
        ),
        ("Time in the model", _duration(summary.get("model_seconds"))),
        ("Time in the solver", _duration(summary.get("solver_seconds"))),
    ]
    return markup.facts(rows)


def _share_or_dash(value: float | None) -> str:
    return "–" if value is None else format_share(value)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{text} {unit}".strip()


def _duration(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)
