"""The report's charts of scores, head mask, training, memory and time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from bosch.model.cache_size import CacheSize
from bosch.search.methods import METHODS
from bosch.window import Window
from stages.evaluate.scores import HYBRID, ORIGINAL, BinLoss, SuiteScores
from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
    format_share,
)
from stages.pages.charts import (
    Axis,
    AxisForm,
    Picture,
    Style,
    colour,
    curves,
    layers,
    ranking,
    styles,
    values,
)
from stages.report.results import Results, Search, label_of
from stages.report.verdict import differences, final_model, kind_of
from stages.train.stage import TrainingStep

LOOK = {
    "original": Style("original", dashed=True),
    "untrained": Style("untrained", "diamond"),
    "trained": Style("hybrid"),
    "rival": Style("soft", "square"),
}
# Room for the text right of the longest bar.
POINTS = Axis("Needle average (points of 100)", domain=(0.0, 108.0), values=range(0, 101, 20))


def averages(results: Results) -> Picture | None:
    """Needle averages of the search's hybrid, its rivals and the original; None without scores."""
    label = METHODS[results.search.mask.method].label
    hybrid, trained = results.checkpoint(HYBRID), results.trained
    models = [(rival.label, "rival", rival.suite) for rival in results.rivals]
    models += [(f"{label}, untrained", "untrained", hybrid.suite)] if hybrid else []
    models += [(f"{label}, trained", "trained", trained.suite)] if trained else []
    if not models:
        return None
    rows = [ranking_row(name, series, *interval_of(suite)) for name, series, suite in models]
    text = ", ".join(f"{row['label']} {row['text']}" for row in rows) + _original_text(results)
    return Picture("standing", ranking(rows, POINTS, LOOK, reference=_original(results)), text)


def ranking_row(
    label: str, series: str, average: float, low: float, high: float, kind: str = "interval"
) -> dict[str, Any]:
    """A row of a ranking: an average in points with its interval."""
    text = format_score(average)
    tip = f"{label}: {text}, {kind} {format_score(low)} to {format_score(high)}"
    row = {"label": label, "series": series, "x": average, "low": low, "high": high}
    return row | {"text": text, "tip": tip}


def interval_of(suite: SuiteScores) -> tuple[float, float, float]:
    """The average and the ends of its interval."""
    low = suite.average if suite.low is None else suite.low
    high = suite.average if suite.high is None else suite.high
    return suite.average, low, high


def against_original(results: Results) -> list[Picture]:
    """Paired differences of the untrained and the last trained hybrid, one picture per unit."""
    models = dict.fromkeys((HYBRID, final_model(results)))
    pictures = []
    for unit, title in (("points", "Score, points of 100"), ("nats", "Loss, nats per token")):
        rows: list[dict[str, Any]] = [
            {"label": f"{row.name}, {kind_of(model)}", "series": kind_of(model), "x": row.mean,
             "low": row.low, "high": row.high, "text": row.text, "tip": row.text}
            for model in models for row in differences(results, model) if row.unit == unit
        ]  # fmt: skip
        if rows:
            ends = [row[name] for row in rows for name in ("x", "low", "high")]
            low, high = extent([0.0, *(end for end in ends if end is not None)])
            # Room for the texts right of the marks.
            axis = Axis(f"{title}, less the original's", domain=(low, high + 0.3 * (high - low)))
            chart = ranking(rows, axis, LOOK, reference=("", 0.0), bars=False)
            text = "; ".join(f"{row['label']} {row['text']}" for row in rows)
            pictures.append(Picture(f"difference-{unit}", chart, f"{text}."))
    return pictures


def head_mask(search: Search) -> Picture:
    """Layers (x) by KV heads (y), with a colour for full heads and for those of each window."""
    mask, sliding = search.mask.mask, search.mask.mask.swa_kv_heads
    kinds: dict[Window | None, str] = {None: "full"}
    for window in search.windows:
        kinds[window] = "sliding" if len(search.windows) == 1 else f"W = {window.size:,}"
    rows = [
        {"x": layer, "y": head, "series": kind, "tip": f"layer {layer}, KV head {head}: {kind}"}
        for layer, row in enumerate(mask.windows_per_layer(search.mask.windows))
        for head, kind in enumerate(kinds[window] for window in row)
    ]
    counts = [{"x": layer, "text": len(heads)} for layer, heads in enumerate(sliding)]
    x = alt.X("x:O", title="Layer", axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.08))
    look = styles(kinds.values(), {"full": Style("full"), "sliding": Style("sliding")})
    cells = alt.Chart(values(rows)).mark_rect(cornerRadius=2).encode(
        x=x, y=alt.Y("y:O", title="KV head", scale=alt.Scale(padding=0.08)),
        color=colour(look), tooltip="tip:N",
    )  # fmt: skip
    numbers = alt.Chart(values(counts)).mark_text(y=-9, fontWeight="bold", fontSize=11)
    text = ", ".join(f"{layer}: {len(heads)}" for layer, heads in enumerate(sliding))
    text = f"{search.sliding} of {search.total} KV heads slide. Sliding heads by layer: {text}."
    chart = alt.layer(cells, numbers.encode(x=x, text="text:N"))
    return Picture("mask", chart.properties(height=24 * search.mask.num_key_value_heads), text)


_LAYER_PANELS = (
    ("best_score", "Best score", "hybrid", "Score once this layer and those above slide"),
    ("drop", "Added drop d", "untrained", "Drop added by this layer, relative to the original"),
    ("weight", "Weight w", "fourth", "Weight: the larger, the harder to localise"),
    ("ratio", "SWA ratio", "fifth", "Assigned share of sliding heads"),
)


def layer_importance(search: Search) -> list[Picture]:
    """A chart by layer of each quantity of Algorithms 1 and 2; empty if the search has none."""
    pictures = []
    for field, label, colour_name, heading in _LAYER_PANELS:
        layer_rows = sorted(search.summary.layer_importance, key=lambda row: row.layer)
        rows = [
            {"x": row.layer, "y": value, "tip": f"layer {row.layer}: {label.lower()} {value:.4g}"}
            for row in layer_rows if (value := getattr(row, field)) is not None
        ]  # fmt: skip
        if not rows:
            continue
        high = max(abs(row["y"]) for row in rows)
        domain = (0.0, 1.0) if field != "drop" else None
        is_small = field == "drop" and high < 0.02
        form: AxisForm = "number" if field == "weight" or is_small else "share"
        chart = alt.Chart(values(rows)).mark_bar(color=f"var(--{colour_name})").encode(
            x=alt.X("x:O", title="Layer", axis=alt.Axis(labelAngle=0)),
            y=Axis(label, form, zero=True, domain=domain).of(alt.Y, "y"),
            tooltip="tip:N",
        )  # fmt: skip
        text = ", ".join(f"{row['x']}: {row['y']:.3g}" for row in rows)
        chart = chart.properties(height=130)
        pictures.append(Picture(f"layer-{field}", chart, f"{text}.", heading))
    return pictures


def recovery(results: Results) -> Picture:
    """Needle average over training tokens: the hybrid's checkpoints, and the original."""
    rows: list[dict[str, Any]] = []
    for scores in sorted(results.needle, key=lambda scores: scores.tokens or 0):
        if scores.tokens is not None:
            average, low, high = interval_of(scores.suite)
            series = "trained" if scores.tokens else "untrained"
            at = f"{format_count(scores.tokens)} tokens" if scores.tokens else "untrained"
            rows.append({"x": scores.tokens, "y": average, "low": low, "high": high,
                         "series": series, "tip": f"{at}: {format_score(average)}"})  # fmt: skip
    look = {name: LOOK[name] for name in ("untrained", "trained")}
    text = ", ".join(f"{format_score(row['y'])} at {format_count(row['x'])} tokens" for row in rows)
    y = Axis("Needle average (points)", domain=(0.0, 105.0))
    chart = curves(rows, Axis("Training tokens", "count", zero=True), y, look,
                   reference=_original(results), has_lines=False)  # fmt: skip
    line = alt.Chart(values(rows)).mark_line(color="var(--hybrid)").encode(x="x:Q", y="y:Q")
    return Picture(
        "recovery", chart + line, f"Hybrid: {text}{_original_text(results)}",
        "Needle average over training tokens",
    )  # fmt: skip


def training_loss(steps: Sequence[TrainingStep], loss_in_words: str = "") -> Picture:
    """Training loss over tokens: each logged step (faint) and a running mean.

    The heading names the loss if it is not the cross-entropy alone.
    """
    rows = [
        {"x": step.tokens, "y": step.loss,
         "tip": f"{format_count(step.tokens)} tokens: {step.loss:.3f}"}
        for step in steps
    ]  # fmt: skip
    reach = max(1, len(rows) // 25)  # steps on each side of the running mean
    base = alt.Chart(values(rows)).encode(x=Axis("Training tokens", "count").of(alt.X, "x"))
    y = Axis("Loss (nats per token)")
    logged = base.mark_line(opacity=0.35, strokeWidth=1, point={"size": 14, "opacity": 0.35})
    mean = base.transform_window(mean="mean(y)", frame=[-reach, reach]).mark_line()
    line_colour = alt.value("var(--hybrid)")
    chart = layers(
        logged.encode(y=y.of(alt.Y, "y"), color=line_colour, tooltip="tip:N"),
        mean.encode(y=y.of(alt.Y, "mean"), color=line_colour), height=280,
    )  # fmt: skip
    text = (
        f"{len(rows)} logged steps, from {rows[0]['y']:.3f} to {rows[-1]['y']:.3f} nats per token."
    )
    name = f"Training loss ({loss_in_words})" if loss_in_words else "Training loss"
    heading = f"{name}: running mean, each logged step behind it"
    return Picture("loss", chart, text, heading)


def positions(results: Results) -> list[Picture]:
    """Loss by position of the original, the untrained hybrid and the last checkpoint."""
    tables = results.scores.positions
    kinds = {ORIGINAL: "original", HYBRID: "untrained", results.scores.last_trained: "trained"}
    models = {str(name): kind for name, kind in kinds.items() if name in tables}
    labels = {name: label_of(name).lower() for name in models}
    look = {labels[name]: LOOK[kind] for name, kind in models.items()}
    pictures = []
    for picture, field, title, heading in (
        ("positions", "loss", "Loss (nats per token)", ""),
        ("positions-difference", "difference", "Difference (nats per token)",
         "Less the original's loss, on the same documents"),
    ):  # fmt: skip
        bins = {name: losses for name in models if (losses := getattr(tables[name], field))}
        if not bins:
            continue
        rows = [
            row
            for name, losses in bins.items()
            for row in _bins(labels[name], tables[name].edges, losses)
        ]
        ends = [f"{labels[name]} {losses[-1].mean:.3f}" for name, losses in bins.items()]
        chart = curves(rows, Axis("Position (tokens, log)", "length", log=True), Axis(title), look)
        pictures.append(Picture(picture, chart, f"In the last bin: {', '.join(ends)}.", heading))
    return pictures


def _bins(label: str, edges: Sequence[int], bins: Sequence[BinLoss]) -> Iterable[dict[str, Any]]:
    for (first, end), loss in zip(itertools.pairwise(edges), bins, strict=True):
        interval = "" if loss.low is None else f" ({loss.low:.3f} to {loss.high:.3f})"
        tip = f"{label}, tokens {first:,} to {end - 1:,}: {loss.mean:.3f}{interval} nats"
        row = {"series": label, "x": math.sqrt(first * end), "y": loss.mean, "tip": tip}
        yield row | {"low": loss.low, "high": loss.high}


def cache_lengths(cache: CacheSize) -> list[int]:
    """The chart's lengths: powers of two from below the widest window to about 256 windows."""
    widest = max(window.size for window in cache.sliding)
    first = max(1, widest // 4).bit_length() - 1
    return [2**power for power in range(first, first + 11)]


def cache_by_length(cache: CacheSize) -> Picture:
    """KV-cache bytes of one sequence over the context length, both axes logarithmic."""
    lengths = cache_lengths(cache)
    rows: list[dict[str, Any]] = [
        {
            "series": series,
            "x": length,
            "y": (size := bytes_at(length)),
            "tip": f"{series}, {format_length(length)}: "
            f"{format_bytes(size)}, {size / cache.original(length):.0%} of the original",
        }
        for series, bytes_at in (("original", cache.original), ("hybrid", cache.dynamic))
        for length in lengths
    ]
    # From the hybrid's smallest cache to the original's largest.
    low, high = math.log2(rows[len(lengths)]["y"]), math.log2(rows[len(lengths) - 1]["y"])
    powers = [2.0**power for power in range(math.ceil(low), math.floor(high) + 1, 2)]
    x = Axis("Context (tokens, log)", "length", log=True, values=lengths)
    y = Axis("KV cache (bytes, log)", "bytes", log=True, values=powers)
    edges = [max(window.past, lengths[0]) for window in cache.sliding]
    texts = ["window full"] + [""] * (len(edges) - 1)  # label at the widest window
    lines = [{"x": edge, "text": text} for edge, text in zip(edges, texts, strict=True)]
    base = alt.Chart(values(lines))
    marks = base.mark_rule(strokeDash=[2, 3], color="var(--soft)").encode(x="x:Q")
    marks += base.mark_text(y="height", dy=-8, dx=6, align="left").encode(x="x:Q", text="text:N")
    look = {"original": LOOK["original"], "hybrid": LOOK["trained"]}
    longest = lengths[-1]
    return Picture(
        "cache", curves(rows, x, y, look) + marks,
        f"At {format_length(longest)} tokens the original holds "
        f"{format_bytes(cache.original(longest))}, the hybrid "
        f"{format_bytes(cache.dynamic(longest))}.", "Cache of one sequence",
    )  # fmt: skip


def document_lengths(statistics: Mapping[str, Any]) -> Picture | None:
    """Share of each source's tokens by document length; None without lengths."""
    sources = statistics.get("sources", {})
    rows, most = [], []
    for name, source in sources.items():
        lengths = source.get("lengths") or []
        total = sum(row["tokens"] for row in lengths)
        label = f"{name}: {format_count(total)} tokens"
        for count in lengths:
            share, documents = count["tokens"] / total, f"{count['documents']:,} documents"
            tip = f"{name}, at most {count['up_to']:,} tokens: {documents}, "
            tip += f"{format_share(share)} of the tokens"
            rows.append({"series": label, "x": count["up_to"], "y": share, "tip": tip})
        if lengths:
            longest = max(lengths, key=lambda row: row["tokens"])
            most.append(f"{name} mostly in documents of at most {longest['up_to']:,} tokens")
    if not rows:
        return None
    x = Axis("Document length, at most (tokens, log)", "length", log=True)
    look = styles(row["series"] for row in rows)
    chart = curves(rows, x, Axis("Share of the source's tokens", "share", zero=True), look)
    return Picture("lengths", chart, f"{'; '.join(most)}.")


def stage_times(seconds: Sequence[tuple[str, float]]) -> Picture:
    """A bar for each stage's seconds."""
    rows = [
        {
            "label": stage,
            "series": "trained",
            "x": value,
            "text": format_seconds(value),
            "tip": f"{stage}: {format_seconds(value)}",
        }
        for stage, value in seconds
    ]
    longest = max(value for _, value in seconds) or 1.0
    axis = Axis("Seconds", "count", domain=(0.0, 1.12 * longest))
    text = ", ".join(f"{row['label']} {row['text']}" for row in rows)
    return Picture("time", ranking(rows, axis, LOOK, step=28), f"{text}.")


def extent(numbers: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value with a non-zero margin on both sides."""
    low, high = min(numbers), max(numbers)
    margin = 0.06 * (high - low) or max(abs(high) * 0.06, 1e-6)
    return low - margin, high + margin


def _original(results: Results) -> tuple[str, float] | None:
    original = results.checkpoint(ORIGINAL)
    if original is None:
        return None
    return f"original {format_score(original.average)}", original.average


def _original_text(results: Results) -> str:
    level = _original(results)
    return "." if level is None else f"; {level[0]}."
