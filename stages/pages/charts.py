"""Charts as declarations (Vega-Lite), drawn as SVG on a page or saved as image files.

Colours are variables of the pages' style sheet, so a chart fits light and dark pages and print.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import altair as alt
import altair.utils.schemapi
import vl_convert

from bosch.files import replacing
from stages.pages.colours import COLOURS

# Altair would validate every part of a chart when it is made: a quarter of a report's time. Tests
# validate whole charts.
altair.utils.schemapi.disable_debug_mode()

PALETTE = ("hybrid", "untrained", "third", "fourth", "fifth", "sixth", "seventh")
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
_CONFIG = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)", "titleColor": "var(--ink)", "gridColor": "var(--rule)",
        "domainColor": "var(--soft)", "tickColor": "var(--soft)", "titleFontWeight": "normal",
        "labelFontSize": 12, "titleFontSize": 12.5, "labelLimit": 280, "labelOverlap": True,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "legend": {
        "orient": "top", "title": None, "labelColor": "var(--ink)", "labelFontSize": 12.5,
        "labelLimit": 340, "symbolStrokeWidth": 0, "columnPadding": 40,
    },
    "title": {"color": "var(--ink)", "fontWeight": "normal", "anchor": "start"},
    "text": {"color": "var(--ink)", "fontSize": 12.5},
    "aria": False,  # screen readers would read each mark; the picture has a description
}  # fmt: skip
_FORMATS = {
    "number": "format(datum.value, '~g')",
    "whole": "datum.value % 1 ? '' : format(datum.value, ',')",
    # As `format_count`: 0.5, not 500m.
    "count": "abs(datum.value) < 1000 ? format(datum.value, '~g') : "
    "replace(format(datum.value, '~s'), 'G', 'B')",
    "share": "format(datum.value, '~%')",
    "length": "datum.value && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : "
    "format(datum.value, ',')",
    "bytes": "datum.value < 1024 ? datum.value + ' B' : datum.value < 1048576 ? "
    "format(datum.value / 1024, '~r') + ' KiB' : datum.value < 1073741824 ? "
    "format(datum.value / 1048576, '.3~r') + ' MiB' : "
    "format(datum.value / 1073741824, '.3~r') + ' GiB'",
}
# Longest names that fit side by side in a legend.
_NARROW = 28
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A chart with its name on the page and its description."""

    name: str
    chart: Any
    description: str
    heading: str = ""

    def svg(self, width: int) -> str:
        """The picture for a page, `width` pixels wide."""
        return vl_convert.vegalite_to_svg(_declaration(self.chart) | {"width": width})


AxisForm = Literal["number", "whole", "count", "share", "length", "bytes"]


class Axis(NamedTuple):
    """Title, form of the labels, and range of an axis."""

    title: str
    form: AxisForm = "number"
    log: bool = False
    domain: tuple[float, float] | None = None
    zero: bool = False
    values: Sequence[float] | None = None

    def of(self, channel: type[alt.X] | type[alt.Y], field: str) -> Any:
        """The encoding of a field along this axis."""
        absent = alt.Undefined
        scale = alt.Scale(
            type="log" if self.log else "linear",
            domain=self.domain or absent,
            domainMin=0 if self.zero else absent,
            zero=False if not (self.log or self.zero) else absent,
            nice=False if self.domain or self.log else absent,
            padding=7 if channel is alt.X and not self.zero else absent,
        )
        labels = alt.Axis(labelExpr=_FORMATS[self.form], values=self.values or absent, tickCount=6)
        return channel(f"{field}:Q", title=self.title, scale=scale, axis=labels)


class Style(NamedTuple):
    """How a series looks: a variable of the style sheet, a shape, and whether it is dashed."""

    colour: str
    shape: str = "circle"
    dashed: bool = False


def styles(names: Iterable[str], fixed: Mapping[str, Style] | None = None) -> dict[str, Style]:
    """A style for each series: that in `fixed`, or one of 42 that `fixed` does not use."""
    fixed, names = fixed or {}, list(dict.fromkeys(names))
    palette = [Style(PALETTE[i % 7], SHAPES[i % 6]) for i in range(42)]
    free = [style for style in palette if style not in fixed.values()]
    return {name: fixed.get(name, free[i % len(free)]) for i, name in enumerate(names)}


def values(rows: Iterable[Row]) -> alt.InlineData:
    return alt.InlineData(values=[dict(row) for row in rows])


def colour(look: Mapping[str, Style]) -> Any:
    """Colours and legend of the series."""
    return _by_series(alt.Color, look, [f"var(--{style.colour})" for style in look.values()])


def shape(look: Mapping[str, Style]) -> Any:
    """Shapes of the series' points, in the same legend."""
    return _by_series(alt.Shape, look, [style.shape for style in look.values()])


def _by_series(channel: Any, look: Mapping[str, Style], values: Sequence[Any]) -> Any:
    """A value for each series; one legend for all channels, none if there is only one series."""
    # Names of any width fit.
    columns = 2 if max(map(len, look)) <= _NARROW else 1
    legend = alt.Legend(symbolOpacity=1, columns=columns) if len(look) > 1 else None
    return channel("series:N", scale=alt.Scale(domain=list(look), range=values), legend=legend)


def curves(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    look: Mapping[str, Style],
    *,
    height: int = 280,
    has_lines: bool = True,
) -> Any:
    """A line with points for each series; rows have series, x, y, optionally low and high."""
    look = {name: style for name, style in look.items() if name in {row["series"] for row in rows}}
    base = alt.Chart(values(rows)).encode(
        x=x.of(alt.X, "x"), y=y.of(alt.Y, "y"), color=colour(look)
    )
    dashes = [[6, 4] if style.dashed else [1, 0] for style in look.values()]
    dash = _by_series(alt.StrokeDash, look, dashes)
    parts = [base.mark_line(strokeWidth=2).encode(strokeDash=dash)] if has_lines else []
    if any(row.get("low") is not None for row in rows):
        intervals = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(
            strokeWidth=1.5
        )
        parts.append(intervals.encode(y=y.of(alt.Y, "low"), y2="high"))
    parts.append(base.mark_point(filled=True, size=55).encode(shape=shape(look)))
    return alt.layer(*parts).properties(height=height)


def ends(rows: Sequence[Row], form: str) -> str:
    """The last value of each series, for a description."""
    last = {row["series"]: row["y"] for row in rows}
    return ", ".join(f"{series} {form.format(value)}" for series, value in last.items())


def save(chart: alt.TopLevelMixin, path: Path, description: str = "") -> None:
    """Write a PNG or SVG (by the suffix) in the light colours, replacing an older file."""
    declaration = json.dumps(_declaration(chart) | {"background": "#ffffff"})
    plain = json.loads(re.sub(r"var\(--([\w-]+)\)", lambda m: COLOURS[m[1]][0], declaration))
    with replacing(path) as temporary:
        if path.suffix == ".png":
            temporary.write_bytes(vl_convert.vegalite_to_png(plain, scale=2))
        else:
            svg = vl_convert.vegalite_to_svg(plain)
            start, end, content = svg.partition(">")
            title = f"<title>{html.escape(description)}</title>" if description else ""
            temporary.write_text(start + end + title + content, encoding="utf-8")


def _declaration(chart: Any) -> dict[str, Any]:
    # Validation takes seconds; a test does it.
    declared: dict[str, Any] = chart.to_dict(validate=False)
    del declared["$schema"]
    if "mark" in declared or "layer" in declared:  # several charts side by side do not stretch
        declared["autosize"] = {"type": "fit-x", "contains": "padding"}
    return declared | {"config": _CONFIG}
