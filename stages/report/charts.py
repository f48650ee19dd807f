"""Inline SVG by hand: scales, axes and marks whose colours come from the page's style sheet.

A mark's look is a CSS class, never an attribute, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

Point = tuple[float, float]
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to the pixels [start, end], linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values inside [low, high], steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    if last < first:
        return nice_ticks(low, high, count + 1)
    return [round(index * step, 12) for index in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """As `nice_ticks`, for axes that count: whole numbers only."""
    return [tick for tick in nice_ticks(low, high, count) if tick == round(tick)]


def left_margin(labels: Iterable[str]) -> float:
    """Pixels left of a plot that hold its tick labels and the upright axis label beside them."""
    return max(52.0, 36.0 + 7.0 * max(map(len, labels), default=0))


def power_ticks(low: float, high: float, base: int, count: int) -> list[float]:
    """Powers of `base` in [low, high], thinned to at most `count` of them by a regular step."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / count))
    return [float(base**exponent) for exponent in range(first, last + 1, step)]


@dataclass
class Canvas:
    """A drawing of `width` x `height` pixels; every method adds marks in drawing order."""

    width: float
    height: float
    elements: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        tip: str = "",
        round_: float = 0,
    ) -> None:
        """A filled rectangle; `tip` shows on hover."""
        corner = f' rx="{_px(round_)}"' if round_ else ""
        box = (
            f'x="{_px(x)}" y="{_px(y)}" width="{_px(max(width, 0))}" height="{_px(max(height, 0))}"'
        )
        self.elements.append(f'<rect class="{css}" {box}{corner}{_tip(tip, "rect")}')

    def line(self, points: Sequence[Point], css: str) -> None:
        """A polyline through `points`."""
        if len(points) > 1:
            path = "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
            self.elements.append(f'<path class="{css}" d="M{path}"/>')

    def dots(self, points: Sequence[Point], css: str) -> None:
        """Many round dots as one path of zero-length strokes: ten thousand stay a small file."""
        if points:
            path = "".join(f"M{_px(x)} {_px(y)}h0" for x, y in points)
            self.elements.append(f'<path class="{css}" d="{path}"/>')

    def circle(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        """One circle; `tip` shows on hover."""
        at = f'cx="{_px(x)}" cy="{_px(y)}" r="{_px(radius)}"'
        self.elements.append(f'<circle class="{css}" {at}{_tip(tip, "circle")}')

    def diamond(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        """A square on its corner, to tell series apart without colour."""
        reach = radius * 1.25
        corners = ((x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y))
        path = "M" + "L".join(f"{_px(left)} {_px(top)}" for left, top in corners) + "Z"
        self.elements.append(f'<path class="{css}" d="{path}"{_tip(tip, "path")}')

    def text(
        self,
        x: float,
        y: float,
        content: str,
        css: str = "tick",
        anchor: str = "start",
        turn: float = 0,
    ) -> None:
        """Text whose anchor is at (x, y), turned by `turn` degrees."""
        rotate = f' transform="rotate({_px(turn)} {_px(x)} {_px(y)})"' if turn else ""
        place = f'x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}"'
        self.elements.append(f'<text class="{css}" {place}{rotate}>{escape(content)}</text>')

    def svg(self, name: str, title: str, description: str) -> str:
        """The element, named by `title` and `description` for people who do not see it."""
        return (
            f'<svg viewBox="0 0 {_px(self.width)} {_px(self.height)}" role="img" '
            f'aria-labelledby="{name}-t {name}-d">'
            f'<title id="{name}-t">{escape(title)}</title>'
            f'<desc id="{name}-d">{escape(description)}</desc>{"".join(self.elements)}</svg>'
        )


def svg_file(element: str) -> str:
    """The element of a drawing as a file of its own, with the page's style sheet inside."""
    opening, _, content = element.partition(">")
    style = f"{STYLE}svg {{ background: var(--card); font-family: sans-serif; }}"
    return f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{content}'


@dataclass
class Plot:
    """A canvas with an x and a y axis."""

    canvas: Canvas
    x: Scale
    y: Scale

    @classmethod
    def make(
        cls,
        width: float,
        height: float,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        *,
        log_x: bool = False,
        log_y: bool = False,
        left: float = 52,
        right: float = 14,
        top: float = 14,
        bottom: float = 44,
    ) -> Plot:
        """A plot that leaves the given margins for labels."""
        return cls(
            Canvas(width, height),
            Scale(*x_range, left, width - right, log_x),
            Scale(*y_range, height - bottom, top, log_y),
        )

    def x_axis(self, ticks: Sequence[float], label: str, fmt: Callable[[float], str]) -> None:
        """Tick labels below the plot and the axis label in the middle under them."""
        base = self.y.start
        self.canvas.line([(self.x.start, base), (self.x.end, base)], "axis")
        for tick in ticks:
            at = self.x(tick)
            self.canvas.line([(at, base), (at, base + 4)], "axis")
            self.canvas.text(at, base + 17, fmt(tick), anchor="middle")
        middle = (self.x.start + self.x.end) / 2
        self.canvas.text(middle, base + 37, label, "label", "middle")

    def y_axis(self, ticks: Sequence[float], label: str, fmt: Callable[[float], str]) -> None:
        """Grid lines with tick labels left of the plot, and the axis label upright beside them."""
        for tick in ticks:
            at = self.y(tick)
            self.canvas.line([(self.x.start, at), (self.x.end, at)], "grid")
            self.canvas.text(self.x.start - 8, at + 4, fmt(tick), anchor="end")
        self.canvas.text(13, (self.y.start + self.y.end) / 2, label, "label", "middle", -90)

    def points(self, values: Sequence[Point]) -> list[Point]:
        """Data as pixels."""
        return [(self.x(x), self.y(y)) for x, y in values]


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _tip(tip: str, tag: str) -> str:
    return f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"
