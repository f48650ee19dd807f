"""The point of a front that a budget chooses, and the budgets of a front's points."""

from __future__ import annotations

from bosch.errors import UserError
from bosch.mask_files import Front
from bosch.search.allotment import spaced_slots
from stages.formats import format_bytes
from stages.search.budget import RequestCache
from stages.search.stage import SearchConfig


def point_slots(section: SearchConfig, cache: RequestCache) -> tuple[int, ...]:
    """KV slots, at `cache.tokens` tokens, of a front's points, ascending."""
    least, most = section.slot_range(cache)
    if section.points is not None:
        return tuple(round(share * most) for share in section.points)
    return tuple(sorted({*spaced_slots(least, cache.tokens, most)}))


def chosen_point(front: Front, search: SearchConfig, cache: RequestCache) -> int:
    """The index of the point within the budget with the best score, the largest of equal ones.

    Among equal scores more cache still lowers the loss of other text. Raises UserError if there is
    no point within the budget.
    """
    masks = [point.mask for point in front.points]
    sizes = [cache.bytes_of(mask) for mask in masks]
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
    return max(fitting, key=lambda index: (front.points[index].score, index))
