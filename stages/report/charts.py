"""The report's charts of scores, losses, memory and the head mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from bosch.masks import HeadMask
from stages.evaluate.scores import HYBRID, ORIGINAL
from stages.fields import Section
from stages.formats import format_bytes, format_length
from stages.pages.charts import Axis, Picture, Style, colour, curves, ends, styles, values
from stages.report.results import Model, Results
from stages.train.stage import TrainConfig, TrainingStep

Row = dict[str, Any]


def scores_by_tokens(results: Results) -> Picture | None:
    """Scores over training tokens at each length, of every branch; None if not trained.

    At a length the mean is over all suites' tasks of this length; `all` if there are no lengths.
    """
    rows: list[Row] = []
    for model in [model for model in results.models if model.is_hybrid]:
        for suite, table in results.tables(model).items():
            for length, score in table.by_length.items():
                series = f"{suite} at {format_length(length)}" if length else suite
                series = f"{model.branch}, {series}" if model.branch else series
                row = {"series": series, "x": model.tokens, "y": score.score}
                rows.append({**row, "low": score.low, "high": score.high})
    if len({row["x"] for row in rows}) < 2:
        return None
    x = Axis("Training tokens", "count", zero=True)
    look = styles(row["series"] for row in rows)
    chart = curves(rows, x, Axis("Score (points of 100)", domain=(0.0, 100.0)), look)
    text = f"After all tokens: {ends(rows, '{:.1f}')}."
    return Picture("score", chart, text, "Score over training tokens, 95 % intervals")


def loss_by_position(results: Results) -> Picture | None:
    """Each model's loss less the original's over the position; None if it was not measured."""
    rows: list[Row] = []
    for model in results.models:
        table = results.positions(model)
        if table is not None and table.difference is not None:
            ranges = itertools.pairwise(table.edges)
            for (first, end), loss in zip(ranges, table.difference, strict=True):
                row = {"series": model.label, "x": math.sqrt(first * end), "y": loss.mean}
                rows.append({**row, "low": loss.low, "high": loss.high})
    if not rows:
        return None
    fixed = {Model(ORIGINAL).label: Style("original", dashed=True)}
    fixed[Model(HYBRID).label] = Style("untrained", "diamond")
    if trained := [model for model in results.models if model.tokens and not model.branch]:
        fixed[trained[-1].label] = Style("hybrid")
    look = styles((model.label for model in results.models), fixed)
    x, y = Axis("Position (tokens, log)", "length", log=True), Axis("Loss (nats per token)")
    heading = "Loss above the original's, by position in held-out documents"
    text = f"In the last bin: {ends(rows, '{:.3f}')}."
    return Picture("positions", curves(rows, x, y, look), text, heading)


def training_loss(steps: Sequence[TrainingStep], section: Section | None) -> Picture | None:
    """Training loss over tokens: each logged step (faint) and a running mean; None without steps.

    The heading names the loss of the section `train` if it is not the cross-entropy alone.
    """
    rows = [{"x": step.tokens, "y": step.loss} for step in steps if step.loss is not None]
    if not rows:
        return None
    reach = max(1, len(rows) // 25)  # steps on each side of the running mean
    x = Axis("Training tokens", "count", zero=True).of(alt.X, "x")
    base, y = alt.Chart(values(rows)).encode(x=x), Axis("Loss (nats per token)")
    logged = base.mark_line(opacity=0.35, strokeWidth=1, point={"size": 14, "opacity": 0.35})
    mean = base.transform_window(mean="mean(y)", frame=[-reach, reach]).mark_line()
    line = alt.value("var(--hybrid)")
    chart = logged.encode(y=y.of(alt.Y, "y"), color=line)
    chart += mean.encode(y=y.of(alt.Y, "mean"), color=line)
    text = f"{len(rows)} logged steps, {rows[0]['y']:.3f} to {rows[-1]['y']:.3f} nats per token."
    words = section.loss_in_words if isinstance(section, TrainConfig) else ""
    name = f"Training loss ({words})" if words else "Training loss"
    name += ": running mean, each logged step behind it"
    return Picture("loss", chart.properties(height=280), text, name)


def memory_by_length(results: Results) -> Picture:
    """Bytes of one request's KV cache over its length, in `generate` and in vLLM."""
    look = {
        "original": Style("original", dashed=True), "hybrid in generate": Style("hybrid"),
        "original in vLLM": Style("soft", "square", dashed=True),
        "hybrid in vLLM": Style("untrained", "diamond"),
    }  # fmt: skip
    widest = max((window.size for window in results.main.found.mask.menu), default=1)
    longest = results.main.config.max_positions or 128 * 1024
    first = min(widest, longest // 2).bit_length() - 2
    lengths = [2**power for power in range(max(first, 0), longest.bit_length())]
    rows: list[Row] = [
        {"series": name, "x": length, "y": size}
        for length in lengths
        for name, size in zip(look, results.main.caches(length), strict=True)
        if size is not None
    ]
    bounds = [math.log2(size(row["y"] for row in rows)) for size in (min, max)]
    powers = [2.0**power for power in range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1, 2)]
    x = Axis("Context (tokens, log)", "length", log=True, values=lengths)
    y = Axis("KV cache (bytes, log)", "bytes", log=True, values=powers)
    sizes = [f"{row['series']} {format_bytes(row['y'])}" for row in rows if row["x"] == lengths[-1]]
    text = f"At {format_length(lengths[-1])}: {', '.join(sizes)}."
    return Picture("cache", curves(rows, x, y, look), text, "KV cache of one request")


def head_mask(mask: HeadMask) -> Picture:
    """Layers (x) by KV heads (y), with a colour for full heads and for those of each window."""
    kinds = {0: "full"}
    for window in mask.menu:
        kinds[window.size] = "sliding" if len(mask.menu) == 1 else f"W = {window.size:,}"
    rows = [
        {"x": layer, "y": head, "series": kinds[size]}
        for layer, row in enumerate(mask.windows)
        for head, size in enumerate(row)
    ]
    x = alt.X("x:O", title="Layer", axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.08))
    y = alt.Y("y:O", title="KV head", scale=alt.Scale(padding=0.08))
    look = styles(kinds.values(), {"full": Style("full"), "sliding": Style("sliding")})
    cells = alt.Chart(values(rows)).mark_rect(cornerRadius=2).encode(x=x, y=y, color=colour(look))
    text = ", ".join(f"{layer}: {sum(map(bool, row))}" for layer, row in enumerate(mask.windows))
    text = f"{mask.num_sliding} of {len(rows)} KV heads slide. Sliding heads by layer: {text}."
    return Picture("mask", cells.properties(height=24 * mask.shape[1]), text)
