"""The layout of greatest total value within a budget of KV slots.

L layers, U units per layer, C choices: 0 is full, k the k-th window from the widest down.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Choices = npt.NDArray[np.int64]  # [L, U]
Order = npt.NDArray[np.int64]  # [L, U], units of each layer from the widest window down
Values = npt.NDArray[np.float64]

_HALVINGS = 50
_POINTS = 8


def slots_of(choices: Choices, costs: Values) -> float:
    """KV slots of a layout; `costs` [C] are those of one unit by its choice."""
    return float(costs[choices].sum())


def share_order(layouts: Sequence[Choices]) -> bool:
    """Whether all layouts of choices [L, H] have a common order of heads or units in each layer."""
    order = np.sum(layouts, axis=0).argsort(axis=1)
    return all(
        (np.diff(np.take_along_axis(layout, order, 1), axis=1) >= 0).all() for layout in layouts
    )


def spaced_slots(lowest: float, unit: float, highest: float) -> list[int]:
    """Eight budgets in even ratios, above `lowest` and a full `unit`, and below `highest`."""
    spaced = np.geomspace(max(lowest, unit), highest, _POINTS + 2)[1:-1]
    return [round(slots) for slots in spaced]


def allotted(
    values: Values,
    costs: Values,
    budget: float,
    *,
    order: Order | None = None,
    narrowest: Choices | None = None,
    widest: Choices | None = None,
) -> Choices:
    """A layout of at most `budget` slots whose values [L, U, C] sum to nearly the maximum.

    Each unit takes the choice with the largest value minus a price for its slots; the price is set
    to meet the budget. Remaining slots widen single units, first by the step with the greatest
    value per slot. With an `order` no unit gets a wider window than one before it. `narrowest` and
    `widest` bound the choices. The layout of the narrowest choices must be within the budget, and
    bounds must not contradict the order.
    """
    layers, units, count = values.shape
    if order is None:
        order = np.tile(np.arange(units), (layers, 1))
        solve = _free
    else:
        solve = _in_order
    choice = np.arange(count)
    low = np.zeros((layers, units), dtype=np.int64) if widest is None else widest
    high = np.full((layers, units), count - 1) if narrowest is None else narrowest
    is_allowed = (choice >= low[..., None]) & (choice <= high[..., None])
    bounded = np.where(is_allowed, values, -np.inf)
    bounded = np.take_along_axis(bounded, order[..., None], axis=1)

    def layout_at(price: float) -> Choices:
        return solve(bounded - price * costs)

    scale = 1.0 + float(np.abs(values).max()) / float(np.abs(np.diff(costs)).min())
    high_price, low_price = scale * units * layers, -scale * units * layers
    best = layout_at(high_price)
    assert slots_of(best, costs) <= budget + 1e-6, "the narrowest choices are beyond the budget"
    if slots_of(layout_at(low_price), costs) <= budget:
        best, high_price = layout_at(low_price), low_price
    for _ in range(_HALVINGS):
        price = (high_price + low_price) / 2
        layout = layout_at(price)
        if slots_of(layout, costs) <= budget:
            best, high_price = layout, price
        else:
            low_price = price
    best = _filled(best, bounded, costs, budget, is_ordered=solve is _in_order)
    result = np.empty_like(best)
    np.put_along_axis(result, order, best, axis=1)
    return result


def _free(profits: Values) -> Choices:
    """Each unit's choice with the largest profit; among equal ones the narrowest."""
    count = profits.shape[2]
    return count - 1 - profits[..., ::-1].argmax(axis=2)


def _in_order(profits: Values) -> Choices:
    """As `_free`, but no unit gets a wider choice than the one before it."""
    layers, units, count = profits.shape
    best, origins = profits[:, 0], []
    rows = np.arange(layers)
    for unit in range(1, units):
        # Best profit, and its choice, over all choices at least this wide of the unit before.
        reached = np.maximum.accumulate(best, axis=1)
        is_new = np.concatenate([np.full((layers, 1), True), best[:, 1:] >= reached[:, :-1]], 1)
        origins.append(np.maximum.accumulate(np.where(is_new, np.arange(count), 0), axis=1))
        best = reached + profits[:, unit]
    choices = np.empty((layers, units), dtype=np.int64)
    choices[:, -1] = _free(best[:, None])[:, 0]
    for unit in range(units - 1, 0, -1):
        choices[:, unit - 1] = origins[unit - 1][rows, choices[:, unit]]
    return choices


def _filled(
    choices: Choices, values: Values, costs: Values, budget: float, is_ordered: bool
) -> Choices:
    """Widen single units while slots are left, first by the greatest value per slot."""
    choices, every_choice = choices.copy(), np.arange(values.shape[2])
    current = np.take_along_axis(values, choices[..., None], axis=2)
    left = budget - slots_of(choices, costs)
    while True:
        steps = costs - costs[choices][..., None]  # [L, U, C]
        is_wider = every_choice < choices[..., None]
        allowed = is_wider & (steps <= left + 1e-6) & np.isfinite(values)
        if is_ordered:
            allowed[:, 1:] &= every_choice >= choices[:, :-1, None]
        if not allowed.any():
            return choices
        with np.errstate(invalid="ignore"):
            gains = np.where(allowed, (values - current) / np.maximum(steps, 1e-9), -np.inf)
        layer, unit, choice = np.unravel_index(int(gains.argmax()), gains.shape)
        left -= float(steps[layer, unit, choice])
        choices[layer, unit] = choice
        current[layer, unit] = values[layer, unit, choice]


def order_of(layouts: list[Choices], values: Values) -> Order:
    """Common order of each layer's units in `layouts`; ties by the value of being full."""
    total = np.sum(layouts, axis=0) if layouts else np.zeros(values.shape[:2])
    return np.lexsort((-values[..., 0] + values[..., -1], total), axis=1)
