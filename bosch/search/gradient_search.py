"""What searches by gradients share: what choices are worth at a layout, and which move to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.search.evaluator import SHARES, Evaluator, Values

Layout = npt.NDArray[Any]


@dataclass
class Move:
    """One way to a new layout, how often it won, and the passes that it took.

    One that is `last` waits until the others no longer win.
    """

    name: str
    propose: Callable[[Any], Layout | None]
    last: bool = False
    wins: int = 0
    passes: float = 0.0

    @property
    def promise(self) -> float:
        """Wins per pass, starting from one win in two passes, so that each move is tried."""
        return (self.wins + 1.0) / (self.passes + 2.0)


def check_passes(needed: float, left: float, what: str) -> None:
    """Raise UserError where a search that has `left` passes cannot pay for those it needs."""
    if left < needed:
        raise UserError(
            f"search.budget_per_layer: {what} costs {needed:.1f} passes over the calibration set, "
            f"and {max(0.0, left):.1f} are left: raise it, or take more examples"
        )


class Worth:
    """What choices are worth at layouts: at each the mean of the gradients that were taken there.

    `take` of a layout and a share of the examples pays for a gradient and gives its values. `cost`
    is that of the dearest share, so that no gradient costs more than was left for it; `taken`
    counts them.
    """

    def __init__(self, evaluator: Evaluator, take: Callable[[Any, int], Values]) -> None:
        self.cost = max(evaluator.cost_of_gradient(share, SHARES) for share in range(SHARES))
        self.taken = 0
        self._take = take
        self._means: dict[bytes, tuple[Values, int]] = {}

    def known(self, layout: Layout) -> Values | None:
        """What is known without another gradient."""
        known = self._means.get(layout.tobytes())
        return None if known is None else known[0]

    def at(self, layout: Layout, gradients: int = 1) -> Values:
        """The mean of at least `gradients` gradients, those taken there before included."""
        mean, count = self._means.get(layout.tobytes(), (np.zeros(1), 0))
        for _ in range(gradients - count):
            mean = self.with_another(layout)
        return mean

    def with_another(self, layout: Layout) -> Values:
        """The mean with one more gradient, over the next share of the examples."""
        values = self._take(layout, self.taken % SHARES)
        self.taken += 1
        mean, count = self._means.get(layout.tobytes(), (np.zeros(1), 0))
        updated: Values = (mean * count + values) / (count + 1)
        self._means[layout.tobytes()] = updated, count + 1
        return updated
