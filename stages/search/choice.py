"""The point of a front that a budget chooses, and the budgets of a front's points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bosch.budget import LayerHeads
from bosch.errors import UserError
from bosch.front import Front
from bosch.search.allotment import spaced_slots
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.search.budget import RequestCache
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe


def point_slots(section: SearchConfig, cache: RequestCache) -> tuple[int, ...]:
    """KV slots, at `cache.tokens` tokens, of a front's points, ascending."""
    least, most = section.slot_range(cache)
    if section.points is not None:
        return tuple(round(share * most) for share in section.points)
    return tuple(sorted({*spaced_slots(least, cache.tokens, most)}))


def budget_rows(
    loaded: LoadedRecipe, budgets: Literal["all"] | Sequence[int | float]
) -> dict[int, list[LayerHeads]]:
    """An estimate, before the search, of each budget's heads by window, by ascending KV slots.

    Full heads are spread evenly over the layers; all others have the narrowest window.
    """
    recipe, kinds = loaded.recipe, shape_of(loaded).kinds
    search = recipe[SearchConfig]
    context = recipe[PrepareConfig].calibration.length
    cache = search.request_cache(kinds, recipe.model.dtype, context)
    heads, window = len(kinds.full) * kinds.heads, search.menu[-1]
    least, most = search.slot_range(cache)
    saved = max(1, cache.tokens - window.held(cache.tokens))
    # The front's points, all heads at the narrowest window, and the original, in whole heads.
    slots_of_front = {least, *point_slots(search, cache), most}
    sizes = sorted({slots - (slots - least) % saved for slots in slots_of_front})
    if budgets == "all":
        chosen = sizes[:-1]
    else:
        chosen = sorted({_slots_of(budget, sizes) for budget in budgets})
    return {slots: cache.with_sliding(heads - (slots - least) // saved, window) for slots in chosen}


def _slots_of(budget: int | float, sizes: Sequence[int]) -> int:
    """KV slots of a budget as in `budget_slots`: a number up to 1 is a share."""
    if budget > 1:
        return int(budget)
    most = budget * sizes[-1] * (1 + 1e-12)
    return max((slots for slots in sizes if slots <= most), default=sizes[0])


def chosen_point(front: Front, search: SearchConfig, cache: RequestCache) -> int:
    """The index of the point within the budget with the best score, then log-likelihood.

    Raises UserError if there is none.
    """
    masks = [front.mask(index) for index in range(len(front.points))]
    sizes = [cache.bytes_of(mask.heads_per_layer(front.windows)) for mask in masks]
    if search.swa_ratio is None:
        fitting = [index for index, size in enumerate(sizes) if size <= cache.allowed_bytes]
    else:
        least = search.swa_ratio * (1 - 1e-12)
        fitting = [index for index, mask in enumerate(masks) if mask.swa_ratio >= least]
    if not fitting:
        field = "swa_ratio" if cache.budget is None else f"budget.{cache.budget.name}"
        raise UserError(
            f"search.{field}: the smallest point of the front holds {cache.text(min(sizes))}, "
            f"more than the {format_bytes(cache.allowed_bytes)} that are allowed"
        )
    points = front.points
    return max(fitting, key=lambda i: (points[i].score, points[i].log_likelihood, -i))
