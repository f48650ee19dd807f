"""The budget of a head mask; imports no numpy, so that the checks of a recipe stay fast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from bosch.errors import UserError
from bosch.window import Window

LayerHeads = Mapping[Window | None, int]  # number of KV heads of a layer by window; None: full


def share_of(count: int, ratio: float) -> int:
    """ceil(ratio · count), robust to rounding: 0.07 * 100 is 7.000000000000001 and gives 7."""
    return math.ceil(ratio * count * (1.0 - 1e-12))


def swa_budget(n_units: int, ratio: float) -> int:
    """Number of sliding units among `n_units` at ratio rho: ceil(rho * n) (BOSCH Algorithm 1).

    Any ratio above 0 gives at least one unit. Raises ValueError when `ratio` is outside [0, 1].
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio must lie in [0, 1], got {ratio}")
    return min(n_units, share_of(n_units, ratio))


def check_granularity(num_layers: int, num_heads: int, swa_ratio: float, granularity: int) -> None:
    """Raise UserError unless `granularity` divides the heads of a layer and the budget."""
    if num_heads % granularity:
        raise UserError(
            f"{num_heads} KV heads per layer are no multiple of {granularity}; choose a divisor of "
            f"{num_heads}",
            "search.head_granularity",
        )
    heads = num_layers * num_heads
    budget = swa_budget(heads, swa_ratio)
    if budget % granularity == 0:
        return
    below = budget // granularity * granularity
    nearest_ratios = [_ratio(n, heads) for n in (below, below + granularity) if n]
    raise UserError(
        f"{swa_ratio:g} means {budget} sliding heads of {heads}, which is no multiple of "
        f"search.head_granularity = {granularity}; choose {' or '.join(nearest_ratios)}",
        "search.swa_ratio",
    )


def _ratio(sliding: int, heads: int) -> str:
    """The shortest ratio whose budget is `sliding` of `heads`."""
    for digits in range(1, 17):
        text = f"{sliding / heads:.{digits}g}"
        if swa_budget(heads, min(1.0, float(text))) == sliding:
            return text
    raise AssertionError(f"no ratio gives {sliding} of {heads}")


def window_shares(rows: Sequence[LayerHeads]) -> dict[Window, float]:
    """Share of all KV heads that has each window."""
    heads: Counter[Window | None] = Counter()
    for row in rows:
        heads.update(row)
    total = heads.total()
    return {window: count / total for window, count in heads.items() if window is not None}
