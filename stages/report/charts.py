"""The report's charts of scores, losses, memory and the head mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from stages.evaluate.scores import HYBRID, ORIGINAL
from stages.formats import format_bytes, format_count, format_length, format_score
from stages.pages.charts import Axis, Picture, Style, colour, curves, layers, styles, values
from stages.report.results import Model, Results, Search
from stages.train.stage import TrainingStep

Row = dict[str, Any]


def _look(results: Results) -> dict[str, Style]:
    """The style of each model by its label."""
    fixed = {Model(ORIGINAL).label: Style("original", dashed=True)}
    fixed[Model(HYBRID).label] = Style("untrained", "diamond")
    if trained := [model for model in results.models if model.tokens and not model.branch]:
        fixed[trained[-1].label] = Style("hybrid")
    return styles((model.label for model in results.models), fixed)


def curves_of(results: Results) -> list[Picture | None]:
    """The charts of scores and losses."""
    return [
        scores_by_tokens(results),
        loss_by_position(results),
        training_loss(results.training, results.loss_in_words),
    ]


def scores_by_tokens(results: Results) -> Picture | None:
    """Scores over training tokens at each length, of every branch; None if not trained.

    At a length the mean is over all suites' tasks of this length; `all` if there are no lengths.
    """
    rows: list[Row] = []
    for model in [model for model in results.models if not model.is_original]:
        tokens = model.tokens
        for suite, table in results.tables(model).items():
            for length, score in table.by_length.items():
                series = f"{suite} at {format_length(length)}" if length else suite
                series = f"{model.branch}, {series}" if model.branch else series
                row = {"series": series, "x": tokens, "y": score.score}
                tip = f"{series}, {format_count(tokens)} tokens: {format_score(score.score)}"
                rows.append({**row, "low": score.low, "high": score.high, "tip": tip})
    if len({row["x"] for row in rows}) < 2:
        return None
    x = Axis("Training tokens", "count", zero=True)
    chart = curves(rows, x, Axis("Score (points of 100)", domain=(0.0, 100.0)),
                   styles(row["series"] for row in rows))  # fmt: skip
    text = "; ".join(row["tip"] for row in rows)
    return Picture("score", chart, f"{text}.", "Score over training tokens, 95 % intervals")


def loss_by_position(results: Results) -> Picture | None:
    """Each model's loss less the original's over the position; None if it was not measured."""
    rows, last = [], []
    for model in results.models:
        table = results.positions(model)
        if table is None or table.difference is None:
            continue
        label = model.label
        last.append(f"{label} {table.difference[-1].mean:.3f}")
        ranges = itertools.pairwise(table.edges)
        for (first, end), loss in zip(ranges, table.difference, strict=True):
            tip = f"{label}, tokens {first:,} to {end - 1:,}: {loss.mean:+.3f} nats"
            row = {"series": label, "x": math.sqrt(first * end), "y": loss.mean, "tip": tip}
            rows.append({**row, "low": loss.low, "high": loss.high})
    if not rows:
        return None
    x, y = Axis("Position (tokens, log)", "length", log=True), Axis("Loss (nats per token)")
    return Picture(
        "positions", curves(rows, x, y, _look(results)), f"In the last bin: {', '.join(last)}.",
        "Loss above the original's, by position in held-out documents",
    )  # fmt: skip


def training_loss(steps: Sequence[TrainingStep], loss_in_words: str = "") -> Picture | None:
    """Training loss over tokens: each logged step (faint) and a running mean; None without steps.

    The heading names the loss if it is not the cross-entropy alone.
    """
    rows = [
        {"x": step.tokens, "y": step.loss,
         "tip": f"{format_count(step.tokens)} tokens: {step.loss:.3f}"}
        for step in steps if step.loss is not None
    ]  # fmt: skip
    if not rows:
        return None
    reach = max(1, len(rows) // 25)  # steps on each side of the running mean
    x = Axis("Training tokens", "count", zero=True).of(alt.X, "x")
    base, y = alt.Chart(values(rows)).encode(x=x), Axis("Loss (nats per token)")
    logged = base.mark_line(opacity=0.35, strokeWidth=1, point={"size": 14, "opacity": 0.35})
    mean = base.transform_window(mean="mean(y)", frame=[-reach, reach]).mark_line()
    line = alt.value("var(--hybrid)")
    chart = layers(
        logged.encode(y=y.of(alt.Y, "y"), color=line),
        mean.encode(y=y.of(alt.Y, "mean"), color=line),
    )
    text = f"{len(rows)} logged steps, {rows[0]['y']:.3f} to {rows[-1]['y']:.3f} nats per token."
    scored = [(step.tokens, step.answers) for step in steps if step.answers is not None]
    if scored:
        text += " Of the search's questions the hybrid answers as the original does " + ", ".join(
            f"{answers:.0%} after {format_count(tokens)} tokens" for tokens, answers in scored[-8:]
        )
        text += "."
    name = f"Training loss ({loss_in_words})" if loss_in_words else "Training loss"
    return Picture("loss", chart, text, f"{name}: running mean, each logged step behind it")


def memory_by_length(results: Results) -> Picture:
    """Bytes of one request's KV cache over its length, in `generate` and in vLLM."""
    widest = max((window.size for window in results.main.search.windows), default=1)
    longest = results.main.config.max_positions or 128 * 1024
    first = min(widest, longest // 2).bit_length() - 2
    lengths = [2**power for power in range(max(first, 0), longest.bit_length())]
    series = ("original", "hybrid in generate", "original in vLLM", "hybrid in vLLM")
    rows: list[Row] = []
    for length in lengths:
        caches = results.main.caches(length)
        for name, size in zip(series, caches, strict=True):
            if size is not None:
                tip = f"{name}, {format_length(length)}: {format_bytes(size)}"
                rows.append({"series": name, "x": length, "y": size, "tip": tip})
    ends = [math.log2(size(row["y"] for row in rows)) for size in (min, max)]
    powers = [2.0**power for power in range(math.ceil(ends[0]), math.floor(ends[1]) + 1, 2)]
    x = Axis("Context (tokens, log)", "length", log=True, values=lengths)
    y = Axis("KV cache (bytes, log)", "bytes", log=True, values=powers)
    look = {
        "original": Style("original", dashed=True), "hybrid in generate": Style("hybrid"),
        "original in vLLM": Style("soft", "square", dashed=True),
        "hybrid in vLLM": Style("untrained", "diamond"),
    }  # fmt: skip
    text = "; ".join(row["tip"] for row in rows[-len(series) :])
    return Picture("cache", curves(rows, x, y, look), f"{text}.", "KV cache of one request")


def head_mask(search: Search) -> Picture:
    """Layers (x) by KV heads (y), with a colour for full heads and for those of each window."""
    mask = search.mask.mask
    kinds = {0: "full"}
    for window in mask.menu:
        kinds[window.size] = "sliding" if len(mask.menu) == 1 else f"W = {window.size:,}"
    rows = [
        {"x": layer, "y": head, "series": kind, "tip": f"layer {layer}, KV head {head}: {kind}"}
        for layer, row in enumerate(mask.windows)
        for head, kind in enumerate(kinds[size] for size in row)
    ]
    x = alt.X("x:O", title="Layer", axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.08))
    look = styles(kinds.values(), {"full": Style("full"), "sliding": Style("sliding")})
    cells = alt.Chart(values(rows)).mark_rect(cornerRadius=2).encode(
        x=x, y=alt.Y("y:O", title="KV head", scale=alt.Scale(padding=0.08)),
        color=colour(look),
    )  # fmt: skip
    text = ", ".join(f"{layer}: {sum(map(bool, row))}" for layer, row in enumerate(mask.windows))
    text = f"{search.sliding} of {search.total} KV heads slide. Sliding heads by layer: {text}."
    return Picture("mask", cells.properties(height=24 * mask.shape[1]), text)
