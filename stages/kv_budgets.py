"""Budgets of a hybrid that was made from a front, and their names in recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from bosch.model.head_table import budget_slots, kv_budgets, original_slots
from bosch.search.methods import METHODS
from bosch.window import named_share
from stages.fields import MOST, different, parse_count
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe


def _slots_or_share(value: object) -> object:
    """Slots like `4992` or `12k`, or a share like `0.25` or `1.0`."""
    if isinstance(value, str):
        for parse in (float, parse_count) if "." in value else (parse_count, float):
            try:
                return parse(value)
            except ValueError:
                pass
        raise ValueError(f"expected KV slots like 12k, or a share like 0.25, found '{value}'")
    return value


KvBudget: TypeAlias = Annotated[
    Annotated[int, Field(gt=0, le=MOST)] | Annotated[float, Field(gt=0, le=1)],
    BeforeValidator(_slots_or_share),
]
KvBudgets: TypeAlias = Annotated[list[KvBudget], Field(min_length=1), AfterValidator(different)]


def front_faults(
    loaded: LoadedRecipe, field: str, names: Literal["all"] | Sequence[int | float]
) -> Iterator[str]:
    """Faults of a field that names budgets of a front: no front is searched, or out of range."""
    search = loaded.recipe[SearchConfig]
    if not METHODS[search.method].finds_front:
        yield (
            f"{field}: search.method = {search.method} finds one head mask; set search.method: "
            "front, or leave the field out"
        )
    elif names != "all" and loaded.info is not None and loaded.info.kinds.full:
        context = loaded.recipe[PrepareConfig].calibration.length
        cache = search.request_cache(loaded.info.kinds, loaded.recipe.model.dtype, context)
        least, most = search.slot_range(cache)
        for name in names:
            slots = name * most if name <= 1 else name
            if not least <= math.ceil(slots) <= most:
                yield (
                    f"{field}: {name:,} names no budget; at {cache.tokens:,} tokens all heads at "
                    f"{search.menu[-1]} hold {least:,} KV slots, the original {most:,} (a share of "
                    f"{named_share(least, most)} to 1)"
                )


def named_budgets(config: Any, names: Literal["all"] | Sequence[int | float]) -> tuple[int, ...]:
    """KV slots, ascending, of the budgets of a hybrid's configuration that a recipe names.

    `all` are those with sliding heads; without any, the model is the original. Raises UserError for
    an unknown name, or if the configuration has a single head layout.
    """
    if names == "all":
        budgets = kv_budgets(config)
        budget_slots(config, next(iter(budgets), 1))  # raises if there are none
        return tuple(slots for slots in budgets if slots < original_slots(config))
    return tuple(sorted({slots for name in names if (slots := budget_slots(config, name))}))


def budget_share(config: Any, slots: int) -> str:
    """The name of a budget of a hybrid's configuration by `share_names`."""
    budgets = list(kv_budgets(config))
    return share_names(budgets, original_slots(config))[budgets.index(slots)]


def share_names(slots: Sequence[int], original: int) -> list[str]:
    """KV slots as shares of the original's (`12.5 %`), with enough digits to differ."""
    names: list[str] = []
    for digits in range(1, 17):
        names = [
            f"{100 * count / original:.{digits}f}".removesuffix(".0") + " %" for count in slots
        ]
        if len(set(names)) == len(names):
            break
    return names
