"""Shared by the searches that use gradients: mean gradients by layout, and moves to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.search.evaluator import SHARES, Evaluator, Values

Layout = npt.NDArray[Any]


@dataclass
class Move:
    """A rule that proposes layouts, its wins and passes."""

    name: str
    propose: Callable[[Any], Layout | None]
    wins: int = 0
    passes: float = 0.0

    @property
    def promise(self) -> float:
        """Wins per pass, with a prior of one win in two passes, so that each move is tried."""
        return (self.wins + 1.0) / (self.passes + 2.0)


def check_passes(needed: float, left: float, purpose: str) -> None:
    """Raise UserError if a search needs more passes for its `purpose` than it has `left`."""
    if left < needed:
        raise UserError(
            f"search.budget_per_layer: {purpose} costs {needed:.1f} passes over the calibration "
            f"set, and {max(0.0, left):.1f} are left: raise it, or take more examples"
        )


def note_poor_mask(evaluator: Evaluator, share: float, score: float) -> None:
    """Add a note if a mask with half of the original's cache scores less than half as much."""
    original = evaluator.log.get(evaluator.units.head_mask(HeadMask.all_full(*evaluator.shape)))
    if original is not None and share >= 0.5 and score < original.score / 2:
        evaluator.note(
            f"a mask with {share:.0%} of the original's cache scores {score:.4g}, less than half "
            f"of the original's {original.score:.4g}: a better one may have been missed; raise "
            "search.budget_per_layer, or take more examples"
        )


class GradientMeans:
    """Mean gradient by layout; `take(layout, share)` computes one, for at most `cost` passes."""

    def __init__(self, evaluator: Evaluator, take: Callable[[Any, int], Values]) -> None:
        self.cost = max(evaluator.cost_of_gradient(share, SHARES) for share in range(SHARES))
        self.taken = 0
        self._take = take
        self._means: dict[bytes, tuple[Values, int]] = {}

    def known(self, layout: Layout) -> Values | None:
        """The mean at a layout; None without a gradient."""
        known = self._means.get(layout.tobytes())
        return None if known is None else known[0]

    def at(self, layout: Layout, gradients: int = 1) -> Values:
        """The mean of at least `gradients` gradients; computes those that are missing."""
        mean, count = self._means.get(layout.tobytes(), (np.zeros(1), 0))
        for _ in range(gradients - count):
            mean = self.add(layout)
        return mean

    def add(self, layout: Layout) -> Values:
        """Compute one more gradient, over the next part of the examples; returns the new mean."""
        values = self._take(layout, self.taken % SHARES)
        self.taken += 1
        mean, count = self._means.get(layout.tobytes(), (np.zeros(1), 0))
        updated: Values = (mean * count + values) / (count + 1)
        self._means[layout.tobytes()] = updated, count + 1
        return updated
