"""The report's pictures of training, memory and time, each a function of its width in pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bosch.model.cache_size import CacheSize
from stages.evaluate.scores import BinLoss
from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
    format_share,
)
from stages.report.charts import Canvas, Plot, Point, left_margin, nice_ticks, power_ticks
from stages.report.results import NeedleScores
from stages.train.stage import TrainingStep

WIDE, HALF, NARROW = 1000, 474, 340


def responsive(
    draw: Callable[[float, str], str], name: str, wide: float = WIDE, narrow: float = NARROW
) -> str:
    """The picture drawn for a screen and again for a phone; the style sheet shows one."""
    return (
        f'<div class="wide">{draw(wide, name)}</div>'
        f'<div class="narrow">{draw(narrow, name + "-narrow")}</div>'
    )


class ScoreBar(NamedTuple):
    """A model's average in points of 100 with an interval; `css` colours the bar."""

    label: str
    css: str
    average: float
    low: float
    high: float
    kind: str = "interval"


def standing(
    models: Sequence[ScoreBar],
    original: float | None,
    suite: str,
    width: float,
    name: str,
) -> str:
    """A bar for each model's average with its interval; the original's is a line."""
    row, top = 40, 26
    left = min(0.4 * width, 20 + 7.2 * max(len(model.label) for model in models))
    plot = Plot.make(
        width, top + row * len(models) + 48, (0, 100), (0, 1), left=left, right=58, top=top
    )
    base = plot.y.start
    plot.x_axis([0, 25, 50, 75, 100], f"{suite} average (points of 100)", format_count)
    for index, (label, css, average, low, high, kind) in enumerate(models):
        middle = top + row * (index + 0.5)
        end, value = plot.x(average), format_score(average)
        tip = f"{label}: {value}, {kind} {format_score(low)} to {format_score(high)}"
        plot.canvas.rect(left, middle - 11, max(end - left, 2), 22, f"bar {css}", tip, round_=3)
        plot.canvas.line([(plot.x(low), middle), (plot.x(high), middle)], "line interval")
        plot.canvas.text(left - 10, middle + 4, label, "label", "end")
        start = max(plot.x(high), end) + 8
        if original is not None and start - 4 < plot.x(original) < start + 8 * len(value):
            start = plot.x(original) + 8  # beyond the original's line, not on it
        plot.canvas.text(start, middle + 4, value, "mark")
    spoken = ", ".join(f"{model.label} {format_score(model.average)}" for model in models)
    if original is not None:
        at = plot.x(original)
        plot.canvas.line([(at, top - 6), (at, base)], "line original")
        text = f"original {format_score(original)}"
        plot.canvas.text(at, top - 12, text, "mark original-text", "end")
        spoken += f"; original {format_score(original)}"
    return plot.canvas.svg(name, f"{suite} average by model", f"{spoken}.")


class WindowCurve(NamedTuple):
    """Averages of one mask over window sizes: (tokens, average, ends of its interval)."""

    label: str
    css: str
    points: Sequence[tuple[int, float, float, float]]


def window_curves(
    curves: Sequence[WindowCurve], original: float | None, width: float, name: str
) -> str:
    """Needle average over the window size, a curve for each mask; the original's is a line."""
    sizes = sorted({size for curve in curves for size, *_ in curve.points})
    right = 20 + 7.2 * max(len(curve.label) for curve in curves)
    reach = (sizes[0], sizes[-1])
    plot = Plot.make(width, 300, reach, (0, 109), log_x=True, right=right, top=12)
    plot.y_axis([0, 25, 50, 75, 100], "Needle average (points)", format_count)
    plot.x_axis(sizes, "Window (tokens, log)", lambda value: format_length(int(value)))
    if original is not None:
        ends = [(sizes[0], original), (sizes[-1], original)]
        plot.canvas.line(plot.points(ends), "line original")
        text = f"original {format_score(original)}"
        plot.canvas.text(plot.x.start + 11, plot.y(original) - 8, text, "mark original-text")
    for label, css, points in curves:
        plot.canvas.line(plot.points([(x, y) for x, y, *_ in points]), f"line {css}")
        for x, y, low, high in points:
            plot.canvas.line(plot.points([(x, low), (x, high)]), f"line {css}")
            interval = f"{format_score(low)} to {format_score(high)}"
            tip = f"{label}, W = {x:,}: {format_score(y)}, interval {interval}"
            plot.canvas.circle(plot.x(x), plot.y(y), 3.5, f"dot {css}", tip)
        last_x, last_y, *_ = points[-1]
        plot.canvas.text(plot.x(last_x) + 10, plot.y(last_y) + 4, label, "mark")
    spoken = "; ".join(
        f"{label} " + ", ".join(f"{format_score(y)} at {x:,}" for x, y, *_ in points)
        for label, _, points in curves
    )
    return plot.canvas.svg(name, "Needle average over the window size", f"{spoken}.")


def recovery(needle: Sequence[NeedleScores], width: float, name: str) -> str:
    """Needle average over training tokens: the hybrid's checkpoints, and the original as a line."""
    curve = sorted((one.tokens, one.average) for one in needle if one.tokens is not None)
    original = next((one.average for one in needle if one.tokens is None), None)
    last = max((tokens for tokens, _ in curve), default=0) or 1
    plot = Plot.make(width, 300, (0, last), (0, 109), right=26, top=12)
    plot.y_axis([0, 25, 50, 75, 100], "Needle average (points)", format_count)
    ticks = nice_ticks(0, last, 5 if width > 400 else 3)
    plot.x_axis(ticks, "Training tokens", format_count)
    if original is not None:
        plot.canvas.line(plot.points([(0, original), (last, original)]), "line original")
        text = f"original {format_score(original)}"
        plot.canvas.text(plot.x.start + 11, plot.y(original) - 8, text, "mark original-text")
    plot.canvas.line(plot.points(curve), "line hybrid")
    for tokens, average in curve:
        x, y = plot.x(tokens), plot.y(average)
        tip = f"{format_count(tokens)} tokens: {format_score(average)}"
        if tokens == 0:
            plot.canvas.diamond(x, y, 5, "dot untrained", tip)
            close = original is not None and abs(y - plot.y(original)) < 22
            beside = 20 if average > 15 else -24
            at = y + (beside if close else 4)
            plot.canvas.text(x + 11, at, f"untrained {format_score(average)}", "mark")
        else:
            plot.canvas.circle(x, y, 5, "dot hybrid", tip)
    spoken = ", ".join(f"{format_score(y)} at {format_count(x)} tokens" for x, y in curve)
    return plot.canvas.svg(
        name,
        "Needle average over training tokens",
        f"Hybrid: {spoken}. Original: {format_score(original)}.",
    )


def training_loss(steps: Sequence[TrainingStep], width: float, name: str) -> str:
    """Training loss over tokens: every logged step faint, a running mean over it."""
    points = [(step.tokens, step.loss) for step in steps if step.loss is not None]  # skipped ones
    tokens, losses = zip(*points, strict=True)
    low, high = min(losses), max(losses)
    pad = max(0.08 * (high - low), 0.01)
    ticks = nice_ticks(low - pad, high + pad)
    left = left_margin(map(_plain, ticks))
    y_range = (low - pad, high + pad)
    plot = Plot.make(width, 300, (0, max(tokens)), y_range, left=left, right=26, top=20)
    plot.y_axis(ticks, "Loss (nats per token)", _plain)
    plot.x_axis(
        nice_ticks(0, max(tokens), 5 if width > 400 else 3), "Training tokens", format_count
    )
    smooth = running_mean(losses, max(1, len(losses) // 25))
    plot.canvas.line(plot.points(points), "line faint")
    plot.canvas.line(plot.points(list(zip(tokens, smooth, strict=True))), "line hybrid")
    if len(points) == 1:
        plot.canvas.circle(*plot.points(points)[0], 4, "dot hybrid")
    return plot.canvas.svg(
        name,
        "Training loss over tokens",
        f"{len(points)} logged steps, from {losses[0]:.3f} to {losses[-1]:.3f} nats per token.",
    )


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to `reach` neighbours on both sides."""
    means = []
    for index in range(len(values)):
        half = min(reach, index, len(values) - 1 - index)
        neighbours = values[index - half : index + half + 1]
        means.append(sum(neighbours) / len(neighbours))
    return means


def cache_lengths(cache: CacheSize) -> list[int]:
    """Powers of two from below the window to 256 windows: the context lengths worth showing."""
    first = max(1, max(window.size for window in cache.sliding) // 4).bit_length() - 1
    return [2**power for power in range(first, first + 11)]


def cache_by_length(cache: CacheSize, width: float, name: str) -> str:
    """KV-cache bytes of one sequence over the context length, both axes logarithmic."""
    lengths = cache_lengths(cache)
    before = [(float(length), cache.original(length)) for length in lengths]
    after = [(float(length), cache.dynamic(length)) for length in lengths]
    low, high = after[0][1], before[-1][1]
    plot = Plot.make(
        width,
        300,
        (lengths[0], lengths[-1]),
        (low, high),
        log_x=True,
        log_y=True,
        left=72,
        right=26,
    )
    plot.y_axis(power_ticks(low, high, 4, 6), "KV cache (bytes, log)", format_bytes)
    ticks = power_ticks(lengths[0], lengths[-1], 2, 11 if width > 400 else 5)
    plot.x_axis(ticks, "Context (tokens, log)", lambda value: format_length(int(value)))
    for number, window in enumerate(cache.sliding):
        edge = plot.x(max(window.past, lengths[0]))
        plot.canvas.line([(edge, plot.y.start), (edge, plot.y.end)], "line hint")
        if not number:  # the widest
            plot.canvas.text(edge + 6, plot.y.start - 8, "window full", "mark")
    for values, css in ((before, "original"), (after, "hybrid")):
        plot.canvas.line(plot.points(values), f"line {css}")
    for (length, was), (_, now) in zip(before, after, strict=True):
        at, share = format_length(int(length)), f"{now / was:.0%} of the original"
        plot.canvas.circle(
            plot.x(length), plot.y(was), 3, "dot original", f"{at}: {format_bytes(was)}"
        )
        tip = f"{at}: {format_bytes(now)}, {share}"
        plot.canvas.circle(plot.x(length), plot.y(now), 3, "dot hybrid", tip)
    return plot.canvas.svg(
        name,
        "KV-cache size over context length",
        f"At {format_length(lengths[-1])} tokens the original holds {format_bytes(before[-1][1])}, "
        f"the hybrid {format_bytes(after[-1][1])}.",
    )


def loss_by_position(
    curves: Sequence[tuple[str, Sequence[int], Sequence[BinLoss]]],
    label: str,
    width: float,
    name: str,
) -> str:
    """Loss over the position in a document, one curve with its intervals for each model.

    A curve is a colour, the edges of its bins, and their losses or differences of losses.
    """
    ends = [v for *_, bins in curves for bin in bins for v in (bin.mean, bin.low, bin.high)]
    low, high = extent(finite(ends))
    edges = curves[0][1]
    ticks = nice_ticks(low, high)
    left = left_margin(map(_plain, ticks))
    reach = (edges[0], edges[-1])
    plot = Plot.make(width, 300, reach, (low, high), log_x=True, left=left, right=26, top=20)
    plot.y_axis(ticks, label, _plain)
    plot.x_axis(
        power_ticks(*reach, 2, 11 if width > 400 else 5),
        "Position (tokens, log)",
        lambda value: format_length(int(value)),
    )
    for css, edges, bins in curves:
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(edges)]
        means = [bin.mean for bin in bins]
        plot.canvas.line(plot.points(list(zip(middles, means, strict=True))), f"line {css}")
        for x, bin in zip(middles, bins, strict=True):
            tip = f"{bin.mean:.3f} nats"
            if bin.low is not None and bin.high is not None:
                plot.canvas.line(plot.points([(x, bin.low), (x, bin.high)]), f"line {css}")
                tip = f"{bin.mean:.3f} ({bin.low:.3f} to {bin.high:.3f}) nats"
            plot.canvas.circle(plot.x(x), plot.y(bin.mean), 3, f"dot {css}", tip)
    spoken = ", ".join(f"{css} {bins[-1].mean:.3f}" for css, _, bins in curves)
    return plot.canvas.svg(name, f"{label} by position", f"In the last bin: {spoken}.")


class DifferenceBar(NamedTuple):
    """A difference from the original with its interval; `css` colours it."""

    label: str
    css: str
    mean: float
    low: float | None
    high: float | None
    text: str


def differences(bars: Sequence[DifferenceBar], axis: str, width: float, name: str) -> str:
    """A row for each difference: its interval, and its place left or right of 0."""
    row, top = 34, 12
    left = min(0.42 * width, 20 + 7.2 * max(len(bar.label) for bar in bars))
    right = 20 + 7.0 * max(len(bar.text) for bar in bars) if width > 400 else 20
    low, high = extent([0.0, *finite([v for bar in bars for v in (bar.mean, bar.low, bar.high)])])
    plot = Plot.make(
        width, top + row * len(bars) + 48, (low, high), (0, 1), left=left, right=right, top=top
    )
    plot.x_axis(nice_ticks(low, high, 5 if width > 400 else 3), axis, _plain)
    zero = plot.x(0.0)
    plot.canvas.line([(zero, top), (zero, plot.y.start)], "line original")
    for index, bar in enumerate(bars):
        middle = top + row * (index + 0.5)
        plot.canvas.text(left - 10, middle + 4, bar.label, "label", "end")
        if bar.low is not None and bar.high is not None:
            plot.canvas.line([(plot.x(bar.low), middle), (plot.x(bar.high), middle)],
                             f"line {bar.css}")  # fmt: skip
        plot.canvas.circle(plot.x(bar.mean), middle, 5, f"dot {bar.css}", bar.text)
        if width > 400:
            plot.canvas.text(width - 6, middle + 4, bar.text, "mark", "end")
    spoken = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    return plot.canvas.svg(name, axis, f"{spoken}.")


def signed(value: float, digits: int) -> str:
    """A difference with its sign, a real minus included; none for 0."""
    text = f"{value:+.{digits}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def stage_times(seconds: Sequence[tuple[str, float]], width: float, name: str) -> str:
    """One horizontal bar per stage, as long as the stage ran."""
    row, left, right = 30, 96, 96
    canvas = Canvas(width, row * len(seconds) + 8)
    longest = max(value for _, value in seconds) or 1.0
    for index, (stage, value) in enumerate(seconds):
        top = row * index + 4
        length = (width - left - right) * value / longest
        canvas.text(left - 12, top + 16, stage, "label", "end")
        canvas.rect(left, top + 2, max(length, 2), row - 10, "bar hybrid", round_=3)
        canvas.text(left + max(length, 2) + 8, top + 16, format_seconds(value), "mark")
    spoken = ", ".join(f"{stage} {format_seconds(value)}" for stage, value in seconds)
    return canvas.svg(name, "Time per stage", f"{spoken}.")


def document_lengths(
    sources: Sequence[tuple[str, Sequence[Mapping[str, int]]]], width: float, name: str
) -> str:
    """A row of bars for each source: the share of its tokens by the length of their document."""
    row, left = 92, 12
    powers = [math.log2(one["up_to"]) for _, lengths in sources for one in lengths]
    first, last = min(powers), max(powers)
    slot = (width - 2 * left) / (last - first + 1)
    canvas = Canvas(width, row * len(sources) + 36)
    spoken = []
    for index, (source, lengths) in enumerate(sources):
        total = sum(one["tokens"] for one in lengths)
        base = row * (index + 1) - 4
        canvas.text(left, base - 72, f"{source}: {format_count(total)} tokens", "label")
        for one in lengths:
            share = one["tokens"] / total
            x = left + slot * (math.log2(one["up_to"]) - first)
            height = max(60 * share, 1)
            tip = (
                f"at most {one['up_to']:,} tokens: {one['documents']:,} documents, "
                f"{format_share(share)} of the tokens"
            )
            canvas.rect(x + slot / 8, base - height, slot * 0.75, height, "bar hybrid", tip)
        most = max(lengths, key=lambda one: one["tokens"])
        spoken.append(f"{source} mostly in documents of at most {most['up_to']:,} tokens")
    stride = math.ceil(44 / slot)
    for power in range(int(first), int(last) + 1, stride):
        x = left + slot * (power - first + 0.5)
        canvas.text(x, row * len(sources) + 14, format_length(2**power), "tick", "middle")
    under = "Document length, at most (tokens)"
    canvas.text(width / 2, row * len(sources) + 32, under, "tick", "middle")
    return canvas.svg(name, "Length of the documents", f"{'; '.join(spoken)}.")


def bars(
    plot: Plot, values: Sequence[tuple[float, float]], slot: float, css: str, tips: Sequence[str]
) -> None:
    """Vertical bars from zero, centred on their x and three quarters of `slot` wide."""
    zero = plot.y(0.0)
    for (x, y), tip in zip(values, tips, strict=True):
        top = plot.y(y)
        plot.canvas.rect(
            plot.x(x) - 0.375 * slot, min(top, zero), 0.75 * slot, abs(top - zero), css, tip
        )


def finite(values: Sequence[Any]) -> list[float]:
    """The numbers among `values` that can be drawn."""
    numbers = [float(value) for value in values if value is not None]
    return [value for value in numbers if abs(value) < float("inf")]


def extent(values: Sequence[float], pad: float = 0.06) -> Point:
    """Smallest and largest value with a little room on both sides, never of zero height."""
    low, high = min(values), max(values)
    room = pad * (high - low) or max(abs(high) * pad, 1e-6)
    return low - room, high + room


def _plain(value: float) -> str:
    return f"{value:g}"
