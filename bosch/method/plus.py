"""A search at a tenth of the published one's cost: gradients of the heads' gates, then swaps.

1. Start. The derivative of the answers' log-likelihood with respect to each unit's gate says what
   it is worth to keep that unit full. It is taken with every head sliding, with every head full and
   at the masks these two propose, each time over another share of the calibration examples.
2. Swaps. From the best mask so far, a sliding unit of great worth is exchanged for a full one of
   little worth, or several pairs at once, across all layers and always on budget. A mask replaces
   the best one when its score is higher, or equal with a higher log-likelihood; its evaluation ends
   as soon as it can no longer do so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.evaluation_log import Evaluation
from bosch.heads import HeadMask, swa_budget
from bosch.method.bosch import SearchResult, finished
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings

logger = logging.getLogger(__name__)

Worth = npt.NDArray[np.float64]
Units = npt.NDArray[np.int64]

SHARES = 8
_PAIRS_AT_ONCE = (8, 4, 2)


def bosch_plus(ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """Find a mask with exactly ceil(rho N) sliding units, in at most kappa L / 10 evaluations.

    The scorer must be a `GradientScorer`. Raises UserError when the anchors leave nothing to
    search for.
    """
    anchors = ledger.anchors()
    anchors.check()
    search = _Search(ledger, settings)
    mask = search.swapped(search.best_start())
    return finished(ledger, settings, mask, anchors)


def evaluations_of_plus(settings: SearchSettings, num_layers: int) -> int:
    """Evaluations that the search may spend, gradients counted at what they cost."""
    return max(4, round(settings.budget_per_layer * num_layers / 10))


@dataclass
class _Incumbent:
    """The best mask so far."""

    mask: HeadMask
    evaluation: Evaluation

    def beaten_by(self, score: float, log_likelihood: float) -> bool:
        """Whether a mask of these values would be better."""
        ours = (self.evaluation.score, self.evaluation.log_likelihood)
        return (score, log_likelihood) > ours


class _Search:
    """State of one search: what it may still spend, and what it knows of each unit's worth."""

    def __init__(self, ledger: Ledger, settings: SearchSettings) -> None:
        self.ledger = ledger
        self.shape = ledger.scorer.num_layers, ledger.scorer.num_key_value_heads
        units = self.shape[0] * self.shape[1]
        self.full_units = units - swa_budget(units, settings.swa_ratio)
        self.left = float(evaluations_of_plus(settings, self.shape[0]))
        self.worth: Worth = np.zeros(units)
        self.gradients = 0
        self._measured_keys: set[str] = set()

    def best_start(self) -> _Incumbent:
        """The best of the masks that the gradients propose."""
        self.learn(HeadMask.all_sliding(*self.shape))
        self.learn(HeadMask.all_full(*self.shape))
        best = self._measured(self.proposed(), None)
        for _ in range(2):
            self.learn(best.mask)
            proposal = self.proposed()
            if proposal.key not in self._measured_keys:
                best = self._measured(proposal, best)
        return best

    def swapped(self, best: _Incumbent) -> HeadMask:
        """`best` after swaps, until the budget is spent or no swap is left."""
        tried = {best.mask.key}
        candidates = self._swaps(best.mask)
        while self.left > 0:
            candidate = next((c for c in candidates if c.key not in tried), None)
            if candidate is None:
                break
            tried.add(candidate.key)
            found = self._measured(candidate, best)
            if found is not best:
                best = found
                self.learn(best.mask)
                candidates = self._swaps(best.mask)
        return best.mask

    def learn(self, mask: HeadMask) -> None:
        """Add the gradient at `mask`, from the next share of the examples, to the worth."""
        found = self.ledger.gate_gradient(mask, self.gradients % SHARES, SHARES)
        self.gradients += 1
        self.left -= found.full_forward_equivalents
        gradient = np.array(found.values).reshape(-1)
        largest = np.abs(gradient).max()
        if largest > 0:
            self.worth = self.worth + gradient / largest

    def proposed(self) -> HeadMask:
        """The mask that keeps the units of greatest worth full."""
        bits = np.zeros(len(self.worth), dtype=np.bool_)
        bits[np.argsort(-self.worth, kind="stable")[: self.full_units]] = True
        return HeadMask(bits.reshape(self.shape))

    def _measured(self, mask: HeadMask, best: _Incumbent | None) -> _Incumbent:
        """The better one of `mask` and `best`."""
        self.left -= 1
        self._measured_keys.add(mask.key)
        if best is None:
            return _Incumbent(mask, self.ledger.evaluate(mask, "start", "gradients"))
        evaluation = self.ledger.evaluate(mask, "swaps", "swaps", can_win=best.beaten_by)
        won = best.beaten_by(evaluation.score, evaluation.log_likelihood)
        if won and not evaluation.is_bound:
            return _Incumbent(mask, evaluation)
        return best

    def _swaps(self, mask: HeadMask) -> Iterator[HeadMask]:
        """Masks near `mask`, the most promising first."""
        bits = mask.is_full.reshape(-1)
        gains = np.flatnonzero(~bits)
        gains = gains[np.argsort(-self.worth[gains], kind="stable")]
        losses = np.flatnonzero(bits)
        losses = losses[np.argsort(self.worth[losses], kind="stable")]
        most = min(len(gains), len(losses))
        for count in _PAIRS_AT_ONCE:
            if count <= most:
                yield self._exchanged(bits, losses[:count], gains[:count])
        expected = self.worth[gains][:, None] - self.worth[losses]
        order = np.argsort(-expected, axis=None, kind="stable")
        pairs = zip(*np.unravel_index(order, expected.shape), strict=True)
        for gain, loss in pairs:
            yield self._exchanged(bits, losses[loss : loss + 1], gains[gain : gain + 1])

    def _exchanged(self, bits: npt.NDArray[np.bool_], losses: Units, gains: Units) -> HeadMask:
        changed = bits.copy()
        changed[losses] = False
        changed[gains] = True
        return HeadMask(changed.reshape(self.shape))
