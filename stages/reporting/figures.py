"""The report's pictures of training, memory and time, each a function of its width in pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stages.reporting.charts import Canvas, Plot, Point, left_margin, nice_ticks, power_ticks
from stages.reporting.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
)
from stages.reporting.results import Cache, NeedleScores, Training

WIDE, HALF, NARROW = 1000, 474, 340


def responsive(
    draw: Callable[[float, str], str], name: str, wide: float = WIDE, narrow: float = NARROW
) -> str:
    """The picture drawn for a screen and again for a phone; the style sheet shows one."""
    return (
        f'<div class="wide">{draw(wide, name)}</div>'
        f'<div class="narrow">{draw(narrow, name + "-narrow")}</div>'
    )


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


def training_loss(training: Training, width: float, name: str) -> str:
    """Training loss over tokens: every logged step faint, a running mean over it."""
    points = training.points
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
        span = min(reach, index, len(values) - 1 - index)
        part = values[index - span : index + span + 1]
        means.append(sum(part) / len(part))
    return means


def cache_lengths(cache: Cache) -> list[int]:
    """Powers of two from below the window to 256 windows: the context lengths worth showing."""
    first = max(1, (cache.kept + 1) // 4).bit_length() - 1
    return [2**power for power in range(first, first + 11)]


def cache_by_length(cache: Cache, width: float, name: str) -> str:
    """KV-cache bytes of one sequence over the context length, both axes logarithmic."""
    lengths = cache_lengths(cache)
    before = [(float(length), cache.before(length)) for length in lengths]
    after = [(float(length), cache.after(length)) for length in lengths]
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
    edge = plot.x(max(cache.kept, lengths[0]))
    plot.canvas.line([(edge, plot.y.start), (edge, plot.y.end)], "line hint")
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
