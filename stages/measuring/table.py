"""The figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stages.reporting.formats import format_bytes, format_count, format_length

_COLUMNS = (
    "length", "ρ", "W", "prefill\ntokens/s", "decode\ntokens/s", "token\np90, ms",
    "peak\nmemory", "KV\ncache", "per\ntoken",
)  # fmt: skip


def print_table(points: Sequence[dict[str, Any]]) -> None:
    """One row for each point, a section for each length."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for at, point in enumerate(points):
        last = at + 1 == len(points) or points[at + 1]["length"] != point["length"]
        table.add_row(format_length(point["length"]), *_cells(point), end_section=last)
    Console().print(table)


def _cells(point: dict[str, Any]) -> list[str]:
    model = ["original", ""]
    if point["model"] == "hybrid":
        model = [f"{point['swa_ratio']:.3g}", f"{point['window_size']:,}"]
    if point["out_of_memory"]:
        return [*model, "no memory"]
    return [
        *model,
        format_count(point["prefill_tokens_per_second"]),
        format_count(point["decode_tokens_per_second"]),
        f"{1000 * point['decode_seconds_per_token_p90']:.1f}",
        format_bytes(point["memory_peak_bytes"]),
        format_bytes(point["kv_cache_bytes"]),
        format_bytes(point["kv_cache_bytes_per_token"]),
    ]
