"""The point of a front that a budget chooses, and the budgets of a front's points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from bosch.budget import LayerHeads
from bosch.errors import UserError
from bosch.front import Front
from bosch.search.allotment import spaced_slots
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.search.budget import HELD_OUT_EVERY, EngineCache
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe


def point_slots(section: SearchConfig, cache: EngineCache) -> tuple[int, ...]:
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
    cache = search.front_cache(kinds, recipe.model.dtype, context)
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


def chosen_point(front: Front, cache: EngineCache) -> int:
    """The index of the point that a budget chooses.

    Of the points within the budget, the one with the best score, then the best log-likelihood. With
    `keep`, the smallest point for which the lower limits of its held-out score and of all larger
    points' scores reach that share of the original's. Raises UserError if there is none.
    """
    if cache.budget.keep is not None:
        return _keeping_point(front, cache.budget.keep)
    masks = [front.mask(index) for index in range(len(front.points))]
    sizes = [cache.bytes_of(mask.heads_per_layer(front.windows)) for mask in masks]
    ratio = cache.budget.ratio
    if ratio is None:
        fitting = [index for index, size in enumerate(sizes) if size <= cache.allowed_bytes]
    else:
        least = ratio * (1 - 1e-12)
        fitting = [index for index, mask in enumerate(masks) if mask.swa_ratio >= least]
    if not fitting:
        raise UserError(
            f"search.budget.{cache.budget.name}: the smallest point of the front holds "
            f"{cache.text(min(sizes))}, more than the {format_bytes(cache.allowed_bytes)} that are "
            "allowed"
        )
    points = front.points
    return max(fitting, key=lambda i: (points[i].score, points[i].log_likelihood, -i))


def _keeping_point(front: Front, keep: float) -> int:
    *points, largest_point = front.points
    original = largest_point.held_out_score
    if not points or original is None or front.mask(len(points)).num_sliding:
        raise UserError(
            "search.budget.keep: the front has no held-out scores; take more "
            f"prepare.calibration.examples, of which one in {HELD_OUT_EVERY} is held out"
        )
    if original == 0:
        raise UserError(
            "search.budget.keep: the original answers none of the examples held out, so nothing "
            f"can be kept of its score; take more prepare.calibration.examples (one in "
            f"{HELD_OUT_EVERY} is held out), or name a size"
        )
    # Fixed-sequence testing, from the largest down to the first that fails: taking the smallest of
    # all that pass would be wrong more often with more points.
    lows = [point.held_out_low or 0.0 for point in points]
    passing = [*itertools.takewhile(lambda low: low >= keep * original, reversed(lows))]
    if passing:
        return len(lows) - len(passing)
    largest, low = points[-1], lows[-1]
    possible = int(1000 * (low / original)) / 1000  # rounded down: a larger value would be refused
    raise UserError(
        f"search.budget.keep: no layout is known to keep {keep:g} of the original's held-out score "
        f"of {original:.3g}: the largest, of {largest.kv_slots:,} KV slots, scores "
        f"{largest.held_out_score:.3g}, at least {low:.3g} by its one-sided limit; choose "
        f"{possible:g} or less, or take more prepare.calibration.examples"
    )
