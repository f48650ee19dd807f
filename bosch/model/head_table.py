"""`hybrid_attention` of a configuration: the number of KV heads with each window, by layer.

With one window: `window_size`, `sinks`, `full_kv_heads_per_layer`. With several: the ascending
`window_sizes` instead of `window_size`, and `swa_kv_heads_per_layer`: how many heads of each layer
have each of them. A model that serves several budgets has these counts and `kv_slots`, at `context`
tokens, in each of `budgets`. `chosen` has the default's slots, used if `kv_budget` is not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bosch.errors import UserError
from bosch.model.families import decoder_layers
from bosch.window import Window, kv_slots, named_share, rising_menu

_MENU = ({"window_size", "sinks"}, {"window_sizes", "sinks"})
_COUNTS = ({"full_kv_heads_per_layer"}, {"full_kv_heads_per_layer", "swa_kv_heads_per_layer"})
_NESTED = {"context", "chosen", "budgets"}

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


def budget_table(
    budgets: Sequence[Sequence[Mapping[Window | None, int]]], context: int, chosen: int
) -> dict[str, Any]:
    """`hybrid_attention` of several budgets; `chosen`: the default's slots at `context` tokens."""
    by_slots = {kv_slots(rows, context): head_table(rows) for rows in budgets}
    assert chosen in by_slots
    counts = {"full_kv_heads_per_layer", "swa_kv_heads_per_layer"}
    menu = {name: value for name, value in by_slots[chosen].items() if name not in counts}
    entries = []
    for slots, table in sorted(by_slots.items()):
        entries.append({"kv_slots": slots, **{n: v for n, v in table.items() if n in counts}})
    return {**menu, "context": context, "chosen": chosen, "budgets": entries}


def heads_by_window(config: Any) -> Rows:
    """Rows as in `head_table`, of `kv_budget` if there are several; UserError if damaged."""
    slots = chosen_budget(config)
    return _rows(config, _table(config)) if slots is None else kv_budgets(config)[slots]


def chosen_budget(config: Any) -> int | None:
    """KV slots of the budget in `config.kv_budget`, None for one layout; UserError if unknown."""
    return budget_slots(config, getattr(config, "kv_budget", None))


def budget_slots(config: Any, budget: int | float | None) -> int | None:
    """KV slots of the budget that `budget` selects; None for a model with one layout.

    An integer from 2 on selects a budget by its slots, a share up to 1 the largest budget with at
    most this share of the original's slots, None the default. UserError if there is none.
    """
    budgets, where = kv_budgets(config), _where(config)
    if not budgets:
        if budget is not None:
            raise UserError(
                f"{where}: kv_budget is {budget!r:.60}, and the model has a single head layout; "
                "search.method front makes one with several budgets"
            )
        return None
    table = _table(config)
    if budget is None:
        return int(table["chosen"])
    if type(budget) is int and budget in budgets:
        return budget
    original = original_slots(config)
    fitting: list[int] = []
    if type(budget) in (int, float) and 0 < budget <= 1:
        limit = budget * original * (1 + 1e-12)  # tolerates a share that was rounded down
        fitting = [slots for slots in budgets if slots <= limit]
    if not fitting:
        names = ", ".join(f"{slots} ({named_share(slots, original)})" for slots in budgets)
        raise UserError(
            f"{where}: kv_budget is {budget!r:.60}; the model has budgets of {names} KV slots at "
            f"{table['context']:,} tokens, in brackets their share of the original's: name the "
            "slots of one, or a share that one fits into"
        )
    return max(fitting)


def original_slots(config: Any) -> int:
    """KV slots of the original model at the context at which the budgets are counted."""
    kinds = decoder_layers(config)
    return len(kinds.full) * kinds.heads * int(_table(config)["context"])


def kv_budgets(config: Any) -> dict[int, Rows]:
    """The rows of each budget by rising KV slots, none for one layout; UserError if damaged."""
    table = _table(config)
    if "budgets" not in table:
        return {}
    context, entries = table["context"], table["budgets"]
    if type(context) is not int or context < 1 or not isinstance(entries, list) or not entries:
        raise UserError(
            f"{_where(config)}: hybrid_attention must hold a context of tokens and budgets, found "
            f"{json.dumps(table, default=str):.500}; make the model again"
        )
    budgets: dict[int, Rows] = {}
    for entry in entries:
        rows = _rows(config, {**table, **entry} if isinstance(entry, dict) else {})
        slots = kv_slots(rows, context)
        if entry.get("kv_slots") != slots or slots <= max(budgets, default=0):
            raise UserError(
                f"{_where(config)}: hybrid_attention.budgets must be in ascending order of "
                f"kv_slots, and one says {entry.get('kv_slots')!r:.60} where its heads hold "
                f"{slots:,} at {context:,} tokens"
            )
        budgets[slots] = rows
    if type(table["chosen"]) is not int or table["chosen"] not in budgets:
        raise UserError(
            f"{_where(config)}: hybrid_attention.chosen must be the kv_slots of one of its "
            f"budgets, found {table['chosen']!r:.60}"
        )
    return budgets


def _where(config: Any) -> str:
    return getattr(config, "_name_or_path", "") or "config.json"


def _table(config: Any) -> dict[str, Any]:
    """The table; only its keys are checked."""
    table = getattr(config, "hybrid_attention", None)
    several = isinstance(table, dict) and "window_sizes" in table
    nested = isinstance(table, dict) and "budgets" in table
    expected = _MENU[several] | (_NESTED if nested else _COUNTS[several])
    if not isinstance(table, dict) or not expected <= set(table):
        raise UserError(
            f"{_where(config)}: hybrid_attention must hold {', '.join(sorted(expected))}, found "
            f"{json.dumps(table, default=str):.500}; make the model again"
        )
    return table


def _rows(config: Any, table: Mapping[str, Any]) -> Rows:
    """Rows of heads by window, from the menu and counts in `table`."""
    where = _where(config)
    several = "window_sizes" in table
    missing = (_MENU[several] | _COUNTS[several]) - set(table)
    if missing:
        raise UserError(
            f"{where}: one of hybrid_attention.budgets lacks {', '.join(sorted(missing))}; make "
            "the model again"
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
