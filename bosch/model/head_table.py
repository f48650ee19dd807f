"""`hybrid_attention` of a configuration: the number of KV heads with each window, by layer.

With one window: `window_size`, `sinks`, `full_kv_heads_per_layer`. With several: the ascending
`window_sizes` instead of `window_size`, and `swa_kv_heads_per_layer`: how many heads of each layer
have each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.window import Window, rising_menu

# With one window, and with several.
_KEYS = (
    {"window_size", "sinks", "full_kv_heads_per_layer"},
    {"window_sizes", "sinks", "full_kv_heads_per_layer", "swa_kv_heads_per_layer"},
)

Rows = list[dict[Window | None, int]]


def head_table(rows: Sequence[Mapping[Window | None, int]]) -> dict[str, Any]:
    """`hybrid_attention` for rows of heads by window, one for each layer with full attention.

    All rows have the same keys: None for full heads, then the windows from the widest down.
    """
    rising = [window for window in rows[0] if window is not None][::-1]
    several, sizes = len(rising) > 1, [window.size for window in rising]
    table: dict[str, Any] = {"window_sizes": sizes} if several else {"window_size": sizes[0]}
    table |= {"sinks": rising[0].sinks, "full_kv_heads_per_layer": [row[None] for row in rows]}
    if several:
        table["swa_kv_heads_per_layer"] = [[row[window] for window in rising] for row in rows]
    return table


def heads_by_window(config: Any) -> Rows:
    """Rows as in `head_table`; UserError if damaged."""
    where = getattr(config, "_name_or_path", "") or "config.json"
    table = getattr(config, "hybrid_attention", None)
    several = isinstance(table, dict) and "window_sizes" in table
    if not isinstance(table, dict) or not _KEYS[several] <= set(table):
        raise UserError(
            f"{where}: hybrid_attention must hold {', '.join(sorted(_KEYS[several]))}, found "
            f"{json.dumps(table, default=str):.500}; make the model again"
        )
    sizes = table["window_sizes"] if several else [table["window_size"]]
    try:
        if not isinstance(sizes, list):
            raise ValueError(f"window_sizes must be a list, found {sizes!r:.60}")
        menu = rising_menu(sizes, table["sinks"])
    except ValueError as error:
        raise UserError(f"{where}: hybrid_attention.{error}") from error
    kinds = decoder_layers(config)
    heads, layers = kinds.heads, len(kinds.full)
    full = table["full_kv_heads_per_layer"]
    if not _are_counts(full, heads) or len(full) != layers:
        raise UserError(
            f"{where}: hybrid_attention.full_kv_heads_per_layer must hold {layers} "
            f"numbers from 0 to {heads}, one for each layer with full attention, found "
            f"{full!r:.500}"
        )
    sliding = table["swa_kv_heads_per_layer"] if several else [[heads - count] for count in full]
    if (
        not isinstance(sliding, list)
        or len(sliding) != layers
        or not all(_are_counts(row, heads) and len(row) == len(menu) for row in sliding)
        or any(count + sum(row) != heads for count, row in zip(full, sliding, strict=True))
    ):
        raise UserError(
            f"{where}: hybrid_attention.swa_kv_heads_per_layer must hold {len(menu)} numbers, one "
            f"for each window, for each of {layers} layers, which with its full heads make {heads}"
            f", found {sliding!r:.500}"
        )
    return [
        {None: count, **dict(zip(menu, row[::-1], strict=True))}
        for count, row in zip(full, sliding, strict=True)
    ]


def _are_counts(value: Any, limit: int) -> bool:
    """Whether `value` is a list of integers from 0 to `limit`."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= limit for n in value)
