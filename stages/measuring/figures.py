"""The paper's Figures 5 and 6: throughput and memory over the length of the prompt (BOSCH C.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.reporting.formats import format_length

Point = dict[str, Any]

# Field of a point, title of its panel, and what a unit of the axis is.
_PANELS = (
    ("prefill_tokens_per_second", "prefill, tokens/s", 1.0),
    ("decode_tokens_per_second", "decoding, tokens/s", 1.0),
    ("memory_p90_bytes", "memory, 90th percentile, GB", 1e9),
)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d")


def draw_figures(points: Sequence[Point], folder: Path, title: str) -> list[Path]:
    """Write both figures as PNG and SVG; returns the files.

    Figure 5 has a row of panels for each window and a line for each ratio, Figure 6 a row for each
    ratio and a line for each window. Lengths without memory have a cross at the foot of the panel.
    """
    files = _draw(points, folder / "figure_5_ratios", title, "window_size", "swa_ratio")
    return files + _draw(points, folder / "figure_6_windows", title, "swa_ratio", "window_size")


def _ratio(value: float) -> str:
    return f"ρ = {value:.3g}"


def _window(value: int) -> str:
    return f"W = {value:,}"


_LABELS: dict[str, Callable[[Any], str]] = {"swa_ratio": _ratio, "window_size": _window}


def _draw(
    points: Sequence[Point], path: Path, title: str, row_field: str, line_field: str
) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    hybrids = [p for p in points if p["model"] == "hybrid"]
    rows = sorted({p[row_field] for p in hybrids})
    figure = Figure(figsize=(12, 3.7 * len(rows) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(_PANELS), squeeze=False)
    for row, value in enumerate(rows):
        members = [p for p in hybrids if p[row_field] == value]
        lines = {"original": [p for p in points if p["model"] == "original"]}
        for line in sorted({p[line_field] for p in members}):
            lines[_LABELS[line_field](line)] = [p for p in members if p[line_field] == line]
        for axis, panel in zip(axes[row], _PANELS, strict=True):
            _panel(axis, lines, panel)
        axes[row][0].set_ylabel(_LABELS[row_field](value))
        axes[row][-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    with rc_context({"svg.fonttype": "none"}):  # text stays text, to be found and read aloud
        for file in files:
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=120, metadata=metadata)
    return files


def _panel(axis: Any, lines: dict[str, list[Point]], panel: tuple[str, str, float]) -> None:
    field, title, unit = panel
    lengths = sorted({p["length"] for members in lines.values() for p in members})
    for number, (name, members) in enumerate(lines.items()):
        colour = "0.35" if number == 0 else _COLOURS[(number - 1) % len(_COLOURS)]
        there = [p for p in members if not p["out_of_memory"]]
        axis.plot(
            [lengths.index(p["length"]) for p in there],
            [p[field] / unit for p in there],
            marker="o", markersize=4, linestyle="--" if number == 0 else "-", color=colour,
            label=name,
        )  # fmt: skip
        lacking = [lengths.index(p["length"]) for p in members if p["out_of_memory"]]
        if lacking:
            _mark_lack_of_memory(axis, lacking, 0.03 + 0.06 * number, colour)
    axis.set_title(title, fontsize=10)
    axis.set_xlim(-0.3, len(lengths) - 0.7)
    axis.set_xticks(range(len(lengths)), [format_length(n) for n in lengths])
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.set_xlabel("prompt, tokens")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)


def _mark_lack_of_memory(axis: Any, places: list[int], height: float, colour: str) -> None:
    """Crosses at the foot of the panel, at a share `height` of it, and what they mean."""
    foot = axis.get_xaxis_transform()
    axis.plot(places, [height] * len(places), "x", color=colour, transform=foot)
    axis.annotate(
        "out of memory", (places[0], height), xycoords=foot, xytext=(-6, 0),
        textcoords="offset points", ha="right", va="center", fontsize=7, color=colour,
    )  # fmt: skip
