"""The figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stages.reporting.formats import format_bytes, format_count, format_length

_COLUMNS = (
    "prompt", "model", "prefill tokens/s", "decode tokens/s", "p90 per token", "peak memory",
    "KV cache", "per token",
)  # fmt: skip


def print_table(points: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """One row for each point, named by `names`; a section for each length."""
    table = Table(pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("prompt", "model") else "right")
    for at, (point, name) in enumerate(zip(points, names, strict=True)):
        table.add_row(format_length(point["length"]), name, *_cells(point))
        if at + 1 < len(points) and points[at + 1]["length"] != point["length"]:
            table.add_section()
    Console().print(table)


def _cells(point: dict[str, Any]) -> list[str]:
    if point["out_of_memory"]:
        return ["out of memory"]
    return [
        format_count(point["prefill_tokens_per_second"]),
        format_count(point["decode_tokens_per_second"]),
        f"{1000 * point['decode_seconds_per_token_p90']:.1f} ms",
        format_bytes(point["memory_peak_bytes"]),
        format_bytes(point["kv_cache_bytes"]),
        format_bytes(point["kv_cache_bytes_per_token"]),
    ]
