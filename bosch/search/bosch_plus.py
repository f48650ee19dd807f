"""Search by gradients of the heads' gates, with a tenth of the published search's evaluations.

A unit's value at a mask is the derivative of the answers' log-likelihood by its gate: the gain from
making it full. Each gradient uses the next of 8 parts of the calibration examples. The random
numbers are always the same, whatever the seed.

1. Gates. If the budget suffices for two starts, gates are learned by gradients at masks on budget
   (`bosch.search.gates`). For heads that depend on each other these are more informative than
   gradients at masks of mostly full heads. A larger budget uses more of them.
2. Elimination. Starting with every head full, the units of least value become sliding in up to 8
   steps, with a new gradient before each, since a unit's value rises when its substitutes slide.
   With a small budget, exchanges follow before the mask is measured. After gates two more masks are
   measured, if the budget allows: whole layers of greatest value, and the units of greatest mean
   value. Without gates it is the units with the greatest sum of values with every head full and
   with every head sliding.
3. Two tracks. The search continues from both starts. Full units of little value are exchanged for
   sliding ones of great value, in steps that halve, with a new gradient before each; the last mask
   is measured.
4. Single swaps from the better track's best mask, the most promising first, and from the other
   one's when the better has stalled.

A mask replaces a track's best mask if its score is higher, or equal with a higher log-likelihood.
Its evaluation ends as soon as this is impossible.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bosch.objective.evaluation_log import Evaluation
from bosch.search.bosch import SearchResult, final_result
from bosch.search.evaluator import SHARES, Evaluator
from bosch.search.gates import Bits, Gates, RunningMean, Values, largest, scaled
from bosch.search.gradient_search import GradientMeans, check_passes, note_poor_mask
from bosch.search.settings import MIN_PLUS_BUDGET, SearchSettings, plus_budget

logger = logging.getLogger(__name__)

Units = npt.NDArray[np.int64]

_STEPS = 8
_ELIMINATION_SHARE = 0.4
# Gradients for exchanges after the elimination if the budget is small.
_FIRST_EXCHANGES = 2
# Gradients reserved for the exchanges of a track.
_EXCHANGES = 5
# With a small budget: gradients for learned gates, and the largest share for them and their mask.
_GATES = 4
_GATES_SHARE = 0.55
# With a large budget: fewest and most of these gradients, and their share of the passes left by the
# other start, its exchanges and three masks; at most one for every four units.
_MIN_GATES, _MAX_GATES = 6, 64
_GATES_SPARE_SHARE = 0.7
# Fewest full units with which gates are learned: masks of fewer rarely show pairs of them.
_MIN_FULL = 4
# Masks in a row without success before the other track has its turn.
_STALLED = 48
# Penalty on the expected gain of swaps that share a unit with a failed swap.
_FAILURE = 0.05


def bosch_plus(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """A mask with exactly ceil(rho N) sliding units, within `plus_budget`; else UserError."""
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    search = _Search(evaluator, settings)
    _note_least_budget(evaluator, settings)
    check_passes(1 + search.gradients.cost, search.left, "one gradient and one mask")
    search.start()
    search.improve()
    result = final_result(evaluator, settings, evaluator.mask(search.best.bits), anchors)
    note_poor_mask(evaluator, 1 - result.mask.swa_ratio, result.evaluation.score)
    return result


def _note_least_budget(evaluator: Evaluator, settings: SearchSettings) -> None:
    """Add a note if other values of kappa would give the same budget."""
    layers = evaluator.shape[0]
    highest = kappa = settings.budget_per_layer
    while plus_budget(replace(settings, budget_per_layer=highest + 1), layers) == MIN_PLUS_BUDGET:
        highest += 1
    if highest > kappa:
        evaluator.note(
            f"search.budget_per_layer: {kappa} with {layers} layers is the least budget of "
            f"bosch_plus, {MIN_PLUS_BUDGET} passes, and so is every value up to {highest}"
        )


class _Track:
    """The search from one start: its best mask, and its swaps that failed."""

    def __init__(self, start: Bits, best: Evaluation) -> None:
        self.bits, self.best = start, best
        self.failed_swaps = np.zeros(len(start))
        self.without_win = 0  # masks since the last success
        self.exhausted = False


class _Search:
    """State of one search: its tracks, the remaining budget, and the gradients."""

    def __init__(self, evaluator: Evaluator, settings: SearchSettings) -> None:
        self.evaluator = evaluator
        self.shape = evaluator.shape
        self.num_units = self.shape[0] * self.shape[1]
        self.full_units = self.num_units - evaluator.budget
        self.budget = self.left = float(plus_budget(settings, self.shape[0]))
        self.gradients = GradientMeans(evaluator, self._gradient)
        self.tracks: list[_Track] = []
        self._rng = np.random.default_rng(0)
        self._tried: set[bytes] = set()
        self._total_values = np.zeros(self.num_units)

    @property
    def best(self) -> _Track:
        return max(self.tracks, key=lambda track: track.best.rank)

    def start(self) -> None:
        """Measure the masks of learned gates, of the elimination, and some others."""
        logger.info(
            "bosch_plus: %d of %d units stay full, %.0f passes to spend",
            self.full_units, self.num_units, self.left,
        )  # fmt: skip
        all_full = np.ones(self.num_units, dtype=np.bool_)
        at_full = self.gradients.add(all_full)
        self._start_gates()
        # A share of the budget; with a small budget all except the first exchanges and one mask.
        rest = self.left - 1 - (_FIRST_EXCHANGES - 1) * self.gradients.cost
        passes = max(_ELIMINATION_SHARE * self.left, min(rest, _STEPS * self.gradients.cost))
        bits = self._eliminate(all_full, passes)
        if self.left < 1 + (_FIRST_EXCHANGES + 1) * self.gradients.cost:
            bits = self._exchange(bits, max(1, self.full_units // 4))
        track = self._track(bits, "gradients")
        if track is None:
            return
        if len(self.tracks) == 1:
            if self.left >= 1 + self.gradients.cost:
                at_sliding = self.gradients.add(~all_full)
                self._measure(track, self._largest(scaled(at_full) + scaled(at_sliding)), "start")
            return
        layer_values = np.repeat(at_full.reshape(self.shape).sum(axis=1), self.shape[1])
        layers = np.zeros(self.num_units, dtype=np.bool_)
        layers[np.lexsort((-at_full, -layer_values))[: self.full_units]] = True
        for name, mask in (("layers", layers), ("mean", self._largest(self._total_values))):
            if self.left >= 2 + _EXCHANGES * self.gradients.cost:
                self._measure(track, mask, "start", name)

    def _start_gates(self) -> None:
        """Learn gates and measure their mask, if the budget suffices for both starts."""
        count = self._gates_to_learn()
        if not count:
            return
        gates = Gates(self.num_units, self.full_units, self._rng)
        for _ in range(count):
            gates.learn(self.gradients.add(gates.draw()))
        self._track(gates.mask(), "gates")

    def _gates_to_learn(self) -> int:
        """Number of gradients for learned gates; 0 if one start needs the whole budget."""
        cost = self.gradients.cost
        if self.full_units < _MIN_FULL:
            return 0
        if self.left < 2 * (1 + _STEPS * cost):
            return _GATES if _GATES_SHARE * self.left >= 1 + _GATES * cost else 0
        spare = self.left - 3 - (_STEPS + _EXCHANGES) * cost
        limit = min(_MAX_GATES, max(_MIN_GATES, self.num_units // 4))
        count = int(min(limit, _GATES_SPARE_SHARE * spare / cost)) if cost > 0 else limit
        return count if count >= _MIN_GATES else 0

    def _track(self, bits: Bits, name: str) -> _Track | None:
        """A new track from a mask, which is measured; None if another track has that mask."""
        if bits.tobytes() in self._tried:
            return None
        self._tried.add(bits.tobytes())
        self.left -= 1
        track = _Track(bits, self.evaluator.evaluate(self.evaluator.mask(bits), "start", name))
        self.tracks.append(track)
        self._log_best(name, track)
        return track

    def improve(self) -> None:
        """Exchanges in each track, then swaps until the budget or the proposals are exhausted."""
        for track in sorted(self.tracks, key=lambda t: t.best.rank, reverse=True):
            if self.left > 1 + 2 * self.gradients.cost:
                bits = self._exchange(track.bits, max(1, self.full_units // 4))
                self._measure(track, bits, "swaps")

        def turn(track: _Track) -> tuple[int, float, float]:
            score, log_likelihood = track.best.rank
            return track.without_win // _STALLED, -score, -log_likelihood

        while tracks := [t for t in self.tracks if not t.exhausted and self._can_swap(t)]:
            track = min(tracks, key=turn)
            swapped = self._swap(track)
            if swapped is None:
                track.exhausted = True
            else:
                won = self._measure(track, swapped, "swaps", "swap")
                track.without_win = 0 if won else track.without_win + 1

    def _can_swap(self, track: _Track) -> bool:
        """Whether the budget suffices for one more mask and the gradient that proposes it."""
        is_known = self.gradients.known(track.bits) is not None
        return self.left >= 1 + (0.0 if is_known else self.gradients.cost)

    def _gradient(self, bits: Bits, share: int) -> Values:
        """A gradient at a mask: the value of each unit there."""
        result = self.evaluator.gate_gradient(self.evaluator.mask(bits), share, SHARES)
        self.left -= self.evaluator.cost_of_gradient(share, SHARES)
        logger.info(
            "bosch_plus: gradient %d at %d full units, %.1f passes left",
            self.gradients.taken + 1, bits.sum(), max(0.0, self.left),
        )  # fmt: skip
        values = np.array(result.values, dtype=np.float64).reshape(-1)
        self._total_values += values
        return values

    def _largest(self, values: Values) -> Bits:
        return largest(values, self.full_units)

    def _measure(
        self, track: _Track, bits: Bits, phase: str, subproblem: str = "gradients"
    ) -> bool:
        """Measure a mask; returns whether it became the track's best."""
        if bits.tobytes() in self._tried:
            return False
        self._tried.add(bits.tobytes())
        best = track.best
        self.left -= 1
        evaluation = self.evaluator.evaluate(self.evaluator.mask(bits), phase, subproblem)
        won = evaluation.rank > best.rank
        if won:
            track.bits, track.best = bits, evaluation
            track.failed_swaps[:] = 0
            self._log_best(subproblem, track)
        return won

    def _log_best(self, name: str, track: _Track) -> None:
        if self.best is track:
            logger.info(
                "bosch_plus: %s: best mask so far, score %.4f, log-likelihood %.4f, "
                "%.1f passes left",
                name, *track.best.rank, max(0.0, self.left),
            )  # fmt: skip

    def _eliminate(self, bits: Bits, passes: float) -> Bits:
        """Slide the units of least value down to the budget, with new gradients before each step.

        Steps keep equal shares of full units; if `passes` allow, gradients over parts are averaged.
        """
        surplus = int(bits.sum()) - self.full_units
        steps, shares = min(_STEPS, math.ceil(math.sqrt(surplus))), 1
        if self.gradients.cost > 0:
            steps = min(steps, max(1, int(passes / self.gradients.cost)))
            shares = min(SHARES, max(1, int(0.6 * passes / self.gradients.cost / max(1, steps))))
        start = int(bits.sum())
        running = RunningMean(self.num_units)
        for step in range(1, steps + 1):
            values = running.add(self.gradients.at(bits, shares))
            rest = self.full_units
            if step < steps and rest > 0:
                rest = round(start * (rest / start) ** (step / steps))
            full = np.flatnonzero(bits)
            order = full[np.lexsort((self._rng.permutation(len(full)), values[full]))]
            bits = bits.copy()
            bits[order[: len(full) - rest]] = False
        return bits

    def _exchange(self, bits: Bits, pairs: int) -> Bits:
        """Exchange up to `pairs` pairs, then half as many, while gradients predict a gain."""
        while pairs >= 1 and self.left >= 1 + self.gradients.cost:
            values = self.gradients.at(bits)
            # Sliding units by falling value, and full units by rising value.
            gains, losses = np.flatnonzero(~bits), np.flatnonzero(bits)
            gains = gains[np.argsort(-values[gains], kind="stable")]
            losses = losses[np.lexsort((self._rng.permutation(len(losses)), values[losses]))]
            # Substitutes for each other all predict the same gain, so take only some.
            pool = gains[: 2 * pairs]
            pool = pool[values[pool] > (values[losses[0]] if len(losses) else 0.0)]
            chosen = np.sort(self._rng.permutation(len(pool))[:pairs])
            gains, losses = pool[chosen], losses[: len(chosen)]
            gains = gains[: len(losses)]
            better = values[gains] > values[losses]
            if not better.any():
                break
            bits = _exchanged(bits, losses[better], gains[better])
            pairs //= 2
        return bits

    def _swap(self, track: _Track) -> Bits | None:
        """The most promising untried swap of two units of the best mask."""
        bits = track.bits
        values = self.gradients.at(bits)
        gains, losses = np.flatnonzero(~bits), np.flatnonzero(bits)
        if not len(gains) or not len(losses):
            return None
        penalty = _FAILURE * float(np.abs(values[losses]).mean())
        expected = (values - penalty * track.failed_swaps)[gains][:, None]
        expected = expected - (values + penalty * track.failed_swaps)[losses]
        order = np.argsort(-expected, axis=None, kind="stable")
        for index in order:
            gain, loss = divmod(int(index), len(losses))
            pair = losses[loss : loss + 1], gains[gain : gain + 1]
            child = _exchanged(bits, *pair)
            if child.tobytes() not in self._tried:
                track.failed_swaps[pair[0]] += 1
                track.failed_swaps[pair[1]] += 1
                return child
        return None


def _exchanged(bits: Bits, losses: Units, gains: Units) -> Bits:
    changed = bits.copy()
    changed[losses] = False
    changed[gains] = True
    return changed
