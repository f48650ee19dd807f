"""The report's section on the search: head mask, trace, layers and cost."""

from __future__ import annotations

from functools import partial

from stages.formats import format_seconds, format_share
from stages.report import figures, markup, search_figures
from stages.report.results import Results, Search

TRACE_KEYS = (
    ("anchors", "round", "anchor", "anchors"),
    ("layer_importance", "round", "stage1", "Algorithm 1, layer importance"),
    ("head_selection", "box", "stage3", "Algorithm 3, head selection"),
    ("repair", "round", "anchor", "repair, back to the budget"),
    ("ablation", "round", "stage1", "one head or layer at a time"),
    ("start", "round", "stage1", "masks that gradients propose"),
    ("swaps", "box", "stage3", "swaps that were evaluated in full"),
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
    lead = "Which KV heads attend to everything, and which only to their window."
    keys = [
        ("", "full", f"full attention ({search.total - search.sliding})"),
        ("", "sliding", f"sliding window ({search.sliding})"),
    ]
    picture = figures.responsive(partial(search_figures.head_mask, search), "mask")
    return markup.section("Head mask", lead, markup.card(markup.legend(keys) + picture))


def search_section(results: Results) -> str:
    """Score over evaluations, what each layer's probe said, and what the search cost."""
    search = results.search
    lead = "Evaluations of the search, and what they say about each layer."
    inner = markup.notes(search.summary.notes)
    inner += _trace_cards(search) + _layer_cards(search) + markup.card(_search_facts(search))
    return markup.section("Search", lead, inner)


def _trace_cards(search: Search) -> str:
    if not search.summary.trace:
        text = f"Method {search.mask.method} builds its mask without evaluations."
        return markup.absent(text)
    phases = {point.phase for point in search.summary.trace}
    keys = [key for phase, *key in TRACE_KEYS if phase in phases]
    if search_figures.final_point(search) is not None:
        keys.append(["square", "ratio", "final mask"])
    best = ("stroke", "ink", "best so far in the sub-problem")
    score = markup.legend([*keys, best]) + _trace(search, "score", "trace")
    inner = markup.card(score, "Score over evaluations")
    if any(point.log_likelihood is not None for point in search.summary.trace):
        likelihood = markup.legend(keys) + _trace(search, "log_likelihood", "trace-ll")
        inner += markup.card(likelihood, "Log-likelihood of the answers over evaluations")
    return inner


def _trace(search: Search, quantity: str, name: str) -> str:
    return figures.responsive(partial(search_figures.search_trace, search, quantity), name)


def _layer_cards(search: Search) -> str:
    if not search.summary.layer_importance:
        text = f"Method {search.mask.method} does not probe layers one by one."
        return markup.absent(text)
    cards = []
    for field, label, css, unit, heading in LAYER_PANELS:
        draw = partial(search_figures.layer_panel, search, field, label, css, unit)
        picture = figures.responsive(draw, f"layer-{field}", figures.HALF)
        cards.append(markup.card(picture, heading))
    return markup.grid(cards)


def _search_facts(search: Search) -> str:
    summary = search.summary
    anchors, gradients = summary.anchors, summary.gradients
    rows = [
        ("Method", search.mask.method),
        ("Anchor, every head sliding", _share_or_dash(anchors.all_sliding)),
        ("Anchor, every head full", _share_or_dash(anchors.all_full)),
        ("Score of the final mask", format_share(summary.best_score)),
        ("Log-likelihood of the final mask", _number(summary.best_log_likelihood, "nats")),
        ("Masks evaluated", _number(summary.evaluations, "")),
        *([("Gradients taken", _number(gradients, ""))] if gradients else []),
        ("Model work", _number(summary.full_forward_equivalents, "full passes over D")),
        (
            "Model work without any reuse",
            _number(summary.naive_full_forward_equivalents, "full passes over D"),
        ),
        ("Time in the model", _duration(summary.model_seconds)),
        ("Time in the solver", _duration(summary.solver_seconds)),
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
