"""The paper's Figures 5 and 6: throughput and memory over the length of the prompt (BOSCH C.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands import plots
from stages.formats import format_length

Point = dict[str, Any]

# Field of a point, title of its panel, and what a unit of the axis is.
_PANELS = (
    ("prefill_tokens_per_second", "prefill, tokens/s", 1.0),
    ("decode_tokens_per_second", "decoding, tokens/s", 1.0),
    ("memory_p90_bytes", "memory, 90th percentile, GB", 1e9),
)
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d")


def draw_figures(points: Sequence[Point], folder: Path, title: str) -> list[Path]:
    """Write both figures as PNG and SVG; returns the files.

    Figure 5 has a row of panels for each window and a line for each ratio, Figure 6 a row for each
    ratio and a line for each window. Lengths that ran out of memory have a cross at the foot.
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
    hybrids = [p for p in points if p["model"] == "hybrid"]
    rows = sorted({p[row_field] for p in hybrids})
    figure, axes = plots.panels(len(_PANELS), len(rows), height=3.7 + 0.4 / len(rows))
    axes_of_row = [axes[n : n + len(_PANELS)] for n in range(0, len(axes), len(_PANELS))]
    for row, value in enumerate(rows):
        members = [p for p in hybrids if p[row_field] == value]
        lines = {"original": [p for p in points if p["model"] == "original"]}
        for line in sorted({p[line_field] for p in members}):
            lines[_LABELS[line_field](line)] = [p for p in members if p[line_field] == line]
        for axis, panel in zip(axes_of_row[row], _PANELS, strict=True):
            _panel(axis, lines, panel)
        axes_of_row[row][0].set_ylabel(_LABELS[row_field](value))
        axes_of_row[row][-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        plots.save(figure, file)
    return files


def _panel(axis: Any, lines: dict[str, list[Point]], panel: tuple[str, str, float]) -> None:
    field, title, unit = panel
    lengths = sorted({p["length"] for members in lines.values() for p in members})
    for number, (name, members) in enumerate(lines.items()):
        color = "0.35" if number == 0 else _COLORS[(number - 1) % len(_COLORS)]
        measured = [p for p in members if not p["out_of_memory"]]
        axis.plot(
            [lengths.index(p["length"]) for p in measured],
            [p[field] / unit for p in measured],
            marker="o", markersize=4, linestyle="--" if number == 0 else "-", color=color,
            label=name,
        )  # fmt: skip
        no_memory = [lengths.index(p["length"]) for p in members if p["out_of_memory"]]
        if no_memory:
            _mark_out_of_memory(axis, no_memory, 0.03 + 0.06 * number, color)
    axis.set_title(title, fontsize=10)
    axis.set_xlim(-0.3, len(lengths) - 0.7)
    axis.set_xticks(range(len(lengths)), [format_length(n) for n in lengths])
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.set_xlabel("prompt, tokens")
    plots.horizontal_grid(axis)


def _mark_out_of_memory(axis: Any, places: list[int], height: float, color: str) -> None:
    """Labelled crosses at the foot of the panel; `height` is a share of the panel's."""
    foot = axis.get_xaxis_transform()
    axis.plot(places, [height] * len(places), "x", color=color, transform=foot)
    axis.annotate(
        "out of memory", (places[0], height), xycoords=foot, xytext=(-6, 0),
        textcoords="offset points", ha="right", va="center", fontsize=7, color=color,
    )  # fmt: skip
