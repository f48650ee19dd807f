"""`hybrid_attention` of a configuration: the window of each KV head.

`windows` has a row for each layer with full attention, with a number for each KV head in the base
model's order: 0 for a full head, else its window. Sliding heads also see the first `sinks` tokens.
The weights hold the heads in the order of `head_orders`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.window import Window

Rows = list[dict[Window | None, int]]


def head_table(rows: Sequence[Sequence[Window | None]]) -> dict[str, Any]:
    """`hybrid_attention` for the window of each head, None if full, by layer."""
    sinks = {window.sinks for row in rows for window in row if window is not None}
    windows = [[0 if window is None else window.size for window in row] for row in rows]
    return {"windows": windows, "sinks": max(sinks, default=0)}


def head_windows(config: Any) -> list[list[Window | None]]:
    """The window of each head in the base model's order, None if full; UserError if damaged."""
    table: Any = getattr(config, "hybrid_attention", None)
    kinds = decoder_layers(config)
    try:
        rows = [
            [Window(size, table["sinks"]) if size != 0 else None for size in row]
            for row in table["windows"]
        ]
        if [len(row) for row in rows] == [kinds.heads] * len(kinds.full):
            return rows
        reason = f"windows must have {len(kinds.full)} rows of {kinds.heads} heads"
    except (TypeError, KeyError, ValueError) as error:
        reason = str(error)
    raise UserError(
        f"{getattr(config, '_name_or_path', '') or 'config.json'}: hybrid_attention is damaged "
        f"({reason}); found {json.dumps(table, default=str):.500}; make the model again"
    )


def head_orders(config: Any) -> list[list[int]]:
    """The base model's KV heads in the order of the weights, by layer with full attention.

    Full heads come first, then the widest windows; equal ones keep the base model's order.
    """
    rows = config.hybrid_attention["windows"]
    return [sorted(range(len(row)), key=lambda head: -(row[head] or 2**31)) for row in rows]


def heads_by_window(config: Any) -> Rows:
    """How many heads of each layer are full (None) and have each window, the widest first."""
    rows = head_windows(config)
    menu = {window for row in rows for window in row if window is not None}
    kinds = (None, *sorted(menu, key=lambda window: -window.size))
    return [{kind: row.count(kind) for kind in kinds} for row in rows]


def head_counts(rows: Sequence[Mapping[Window | None, int]]) -> dict[str, Any]:
    """Windows, sinks and numbers of heads by layer, for records of a model.

    `window_size` with one window, None without; with several the ascending `window_sizes`, and for
    each layer how many heads have each of them.
    """
    rising = [window for window in rows[0] if window is not None][::-1]
    several, sizes = len(rising) > 1, [window.size for window in rising]
    table: dict[str, Any] = {"window_sizes": sizes}
    if not several:
        table = {"window_size": sizes[0] if sizes else None}
    table |= {"sinks": rising[0].sinks if rising else 0}
    table |= {"full_kv_heads_per_layer": [row[None] for row in rows]}
    if several:
        table["swa_kv_heads_per_layer"] = [[row[window] for window in rising] for row in rows]
    return table
