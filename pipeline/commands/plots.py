"""Shared helpers of the commands' plots; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bosch.files import replacing

MARKERS = "osD^vP<>X*hp"
GREY = "0.45"


def color(number: int) -> Any:
    """Colour of a series: ten strong ones, then their pale ones."""
    from matplotlib import colormaps

    return colormaps["tab20"](number % 10 * 2 + number // 10 % 2)


def marker(number: int) -> str:
    """Marker of a series."""
    return MARKERS[number % len(MARKERS)]


def panels(
    columns: int, rows: int = 1, width: float = 4.0, height: float = 3.6, **subplots: Any
) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row; `width` and `height` in inches are those of a panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **subplots).reshape(-1))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def horizontal_grid(axis: Any) -> None:
    """Pale horizontal lines behind the data."""
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)


def legend(figure: Any, axis: Any, place: str, columns: int) -> None:
    """One legend for the whole figure, outside its panels."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc=f"outside {place}", ncols=columns, frameon=False, fontsize=8)


def error_bars(intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Lengths below and above the means of (mean, low, high)."""
    return [
        [mean - low for mean, low, _ in intervals],
        [high - mean for mean, _, high in intervals],
    ]


def save(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a PNG or SVG, by the name's suffix, replacing an older one in one step."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else None
    # Text stays text, to be searched and read aloud.
    with rc_context({"svg.fonttype": "none"}), replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, metadata=metadata)
