"""The layout of greatest total value within a budget of KV slots.

L layers, U units per layer, C choices: 0 is full, k the k-th window from the widest down.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Choices = npt.NDArray[np.int64]  # [L, U]
Values = npt.NDArray[np.float64]

_HALVINGS = 50
_POINTS = 8


def slots_of(choices: Choices, costs: Values) -> float:
    """KV slots of a layout; `costs` [C] are those of one unit by its choice."""
    return float(costs[choices].sum())


def spaced_slots(lowest: float, unit: float, highest: float) -> list[int]:
    """Eight budgets in even ratios, above `lowest` and a full `unit`, and below `highest`."""
    spaced = np.geomspace(max(lowest, unit), highest, _POINTS + 2)[1:-1]
    return [round(slots) for slots in spaced]


def allotted(
    values: Values,
    costs: Values,
    budget: float,
    *,
    narrowest: Choices | None = None,
    widest: Choices | None = None,
) -> Choices:
    """A layout of at most `budget` slots whose values [L, U, C] sum to nearly the maximum.

    Each unit takes the choice with the largest value minus a price for its slots, among equal ones
    the narrowest; the price is set to meet the budget. Remaining slots widen single units, first by
    the step with the greatest value per slot. `narrowest` and `widest` bound the choices. The
    layout of the narrowest choices must be within the budget.
    """
    layers, units, count = values.shape
    choice = np.arange(count)
    low = np.zeros((layers, units), dtype=np.int64) if widest is None else widest
    high = np.full((layers, units), count - 1) if narrowest is None else narrowest
    is_allowed = (choice >= low[..., None]) & (choice <= high[..., None])
    bounded = np.where(is_allowed, values, -np.inf)

    def layout_at(price: float) -> Choices:
        profits = bounded - price * costs
        return count - 1 - profits[..., ::-1].argmax(axis=2)

    scale = 1.0 + 2.0 * float(np.abs(values).max()) / float(np.abs(np.diff(costs)).min())
    high_price, low_price = scale, -scale
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
    return _filled(best, bounded, costs, budget)


def _filled(choices: Choices, values: Values, costs: Values, budget: float) -> Choices:
    """Widen single units while slots are left, first by the greatest value per slot."""
    choices, every_choice = choices.copy(), np.arange(values.shape[2])
    current = np.take_along_axis(values, choices[..., None], axis=2)
    left = budget - slots_of(choices, costs)
    while True:
        steps = costs - costs[choices][..., None]  # [L, U, C]
        is_wider = every_choice < choices[..., None]
        allowed = is_wider & (steps <= left + 1e-6) & np.isfinite(values)
        if not allowed.any():
            return choices
        with np.errstate(invalid="ignore"):
            gains = np.where(allowed, (values - current) / np.maximum(steps, 1e-9), -np.inf)
        layer, unit, choice = np.unravel_index(int(gains.argmax()), gains.shape)
        left -= float(steps[layer, unit, choice])
        choices[layer, unit] = choice
        current[layer, unit] = values[layer, unit, choice]
