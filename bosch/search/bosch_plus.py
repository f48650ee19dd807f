"""Search by gradients of the heads' gates, with a tenth of the published search's evaluations.

The derivative of the answers' log-likelihood by a unit's gate says what it is worth, at one mask,
to have that unit full. Each gradient is taken over another share of the calibration examples.

1. Elimination. From every head full, the units of least worth slide in up to 8 steps, with a fresh
   gradient before each: a unit whose substitutes are gone is worth more than it was.
   Where the budget allows little else, exchanges follow before the mask is measured.
2. Gates and corners. Where the budget is small but pays for a second start, gates are learned by
   4 gradients at masks on budget (`bosch.search.gates`): where answers need heads composed, these
   tell more than gradients where most heads are full. A larger budget has another start: it keeps
   the units of greatest worth with every head full and with every head sliding, taken together.
   The search goes on from the best start.
3. Exchanges. From a mask, full units of little worth are exchanged for sliding ones of great worth,
   in steps that halve, with a fresh gradient before each; the mask at the end is measured.
4. Swaps and kicks. Single swaps from the best mask so far, the most promising first; or some units
   of it exchanged at random, or added beyond the budget, then exchanges or elimination from there.
   The kind of move that succeeded more often for its cost is tried more often.

A mask replaces the best one when its score is higher, or equal with a higher log-likelihood; its
evaluation ends as soon as it can no longer do so. A scorer without gradients is searched by swaps
at random.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation
from bosch.search.bosch import SearchResult, final_result
from bosch.search.evaluator import SHARES, Evaluator, Phase
from bosch.search.gates import Gates, largest, scaled
from bosch.search.methods import plus_budget
from bosch.search.settings import SearchSettings

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.bool_]
Worth = npt.NDArray[np.float64]
Units = npt.NDArray[np.int64]

_STEPS = 8
_ELIMINATION_SHARE = 0.4
# Gradients for exchanges that follow the elimination where the budget allows little else.
_FIRST_EXCHANGES = 2
# Gradients for learned gates, and the largest share of the budget for them and their mask.
_GATES = 4
_GATES_SHARE = 0.55
# Full units below which no gates are learned: masks of so few show hardly any of them together.
_FEWEST_FULL = 4
# Largest relative difference at which two gradients are taken to say the same of a unit.
_AGREEMENT = 0.5
_FRUITLESS = 50
# Swaps that fail in a row before moves are tried that need gradients of their own.
_PATIENCE = 24
# What a failed swap takes from the expected gain of others with one of its units.
_FAILURE = 0.05


def bosch_plus(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Find a mask with exactly ceil(rho N) sliding units, in at most kappa L / 10 evaluations.

    Gradients count at their cost in evaluations. The scorer is a `GradientScorer`; any other is
    searched without gradients, which a note says. Raises UserError when the anchors leave nothing
    to search for.
    """
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    search = _Search(evaluator, settings)
    if evaluator.has_gradients and search.left >= 1 + search.gradient_cost:
        search.start()
        search.improve()
    else:
        reason = (
            "the budget does not pay for one gradient and one mask"
            if evaluator.has_gradients
            else "the scorer has no gradients of gates"
        )
        evaluator.note(f"{reason}: bosch_plus made swaps at random instead")
        search.swap_at_random()
    return final_result(evaluator, settings, search.best.mask, anchors)


@dataclass(frozen=True)
class _Incumbent:
    """The best mask so far."""

    mask: HeadMask
    evaluation: Evaluation

    def beaten_by(self, score: float, log_likelihood: float) -> bool:
        """Whether a mask of these values would be better."""
        return (score, log_likelihood) > self.evaluation.rank


@dataclass
class _Move:
    """One way to a new mask, how often it won, and the passes that it took."""

    name: str
    propose: Callable[[], Bits | None]
    wins: int = 0
    passes: float = 0.0

    @property
    def promise(self) -> float:
        """Wins per pass, starting from one win in two passes, so that each move is tried."""
        return (self.wins + 1.0) / (self.passes + 2.0)


class _Search:
    """State of one search: the best mask, what may still be spent, and what gradients said."""

    best: _Incumbent

    def __init__(self, evaluator: Evaluator, settings: SearchSettings) -> None:
        self.evaluator = evaluator
        self.shape = evaluator.shape
        self.num_units = self.shape[0] * self.shape[1]
        self.full_units = self.num_units - evaluator.budget
        self.budget = self.left = float(plus_budget(settings, self.shape[0]))
        self.gradients = 0
        # The dearest share's, so that no gradient costs more than was left for it.
        self.gradient_cost = max(
            (evaluator.cost_of_gradient(share, SHARES) for share in range(SHARES))
            if evaluator.has_gradients
            else (0.0,)
        )
        self._rng = np.random.default_rng(0)
        self._tried: set[bytes] = set()
        self._worth_at: dict[bytes, tuple[Worth, int]] = {}
        self._failures = np.zeros(self.num_units)

    def start(self) -> None:
        """Measure the masks of learned gates, of the elimination and of the corners."""
        logger.info(
            "bosch_plus: %d of %d units stay full, %.0f passes to spend",
            self.full_units, self.num_units, self.left,
        )  # fmt: skip
        everything = np.ones(self.num_units, dtype=np.bool_)
        at_full = self._gradient(everything)
        self._measure_gates()
        bits = self._eliminated(everything, self._for_elimination)
        if self.left < 1 + (_FIRST_EXCHANGES + 1) * self.gradient_cost:
            bits = self._exchanged(bits, max(1, self.full_units // 4))
        self._measure(bits, "start")
        if self.left >= 1 + self.gradient_cost:
            at_sliding = self._gradient(~everything)
            self._measure(self._largest(scaled(at_full) + scaled(at_sliding)), "start")

    def _measure_gates(self) -> None:
        """Measure the mask of learned gates, where the budget is small but pays for both starts.

        A budget of two whole eliminations or more is better spent on the moves that follow one.
        """
        cost = self.gradient_cost
        too_small = _GATES_SHARE * self.left < 1 + _GATES * cost
        is_large = self.left >= 2 * (1 + _STEPS * cost)
        if too_small or is_large or self.full_units < _FEWEST_FULL:
            return
        gates = Gates(self.num_units, self.full_units, self._rng)
        for _ in range(_GATES):
            gates.learn(self._gradient(gates.drawn()))
        self._measure(gates.mask(), "start", "gates")

    @property
    def _for_elimination(self) -> float:
        """Passes for the elimination, the gradient with every head full included.

        A share of the budget; of a small budget all that first exchanges and one mask leave.
        """
        rest = self.left - 1 - (_FIRST_EXCHANGES - 1) * self.gradient_cost
        return max(_ELIMINATION_SHARE * self.left, min(rest, _STEPS * self.gradient_cost))

    def improve(self) -> None:
        """Moves from the best mask until the budget is spent or nothing new is proposed."""
        if self.left > 1 + 2 * self.gradient_cost:
            self._measure(self._exchanged(self._bits, max(1, self.full_units // 4)), "swaps")
        moves = [
            _Move("swap", self._swap),
            _Move("kick", self._kick),
            _Move("regrowth", self._regrowth),
        ]
        fruitless = failures = 0
        while self._can_swap and fruitless < _FRUITLESS:
            before = self.left
            may_kick = failures >= _PATIENCE and self.left > 1 + 3 * self.gradient_cost
            move = max(moves if may_kick else moves[:1], key=lambda m: m.promise)
            bits = move.propose()
            if bits is None or bits.tobytes() in self._tried:
                failures += _PATIENCE if bits is None else 0
                move.passes += max(before - self.left, 1.0)
                fruitless += 1
                continue
            fruitless = 0
            won = self._measure(bits, "swaps", move.name)
            failures = 0 if won and move.name == "swap" else failures + 1
            move.wins += won
            move.passes += before - self.left

    def swap_at_random(self) -> None:
        """The (1+1) algorithm over the whole mask, for a scorer without gradients."""
        logger.info("bosch_plus: no gradients, %.0f evaluations of random swaps", self.left)
        self._measure(self._largest(self._rng.random(self.num_units)), "start")
        fruitless = 0
        while self.left >= 1 and fruitless < _FRUITLESS:
            bits = self._bits
            most = min(self.full_units, self.num_units - self.full_units)
            if most == 0:
                return
            count = 1 + int(
                self._rng.binomial(most - 1, min(1.0, (1 + fruitless) / self.num_units))
            )
            losses = self._rng.choice(np.flatnonzero(bits), count, replace=False)
            gains = self._rng.choice(np.flatnonzero(~bits), count, replace=False)
            child = _exchange(bits, losses, gains)
            if child.tobytes() in self._tried:
                fruitless += 1
                continue
            fruitless = 0
            self._measure(child, "swaps")

    @property
    def _can_swap(self) -> bool:
        """Whether one more mask can be paid, and the gradient that proposes it."""
        has_gradient = self._bits.tobytes() in self._worth_at
        return self.left >= 1 + (0.0 if has_gradient else self.gradient_cost)

    @property
    def _bits(self) -> Bits:
        """The best mask so far, by unit."""
        bits: Bits = self.best.mask.is_full.reshape(-1)
        return bits

    def _mask(self, bits: Bits) -> HeadMask:
        return HeadMask(bits.reshape(self.shape))

    def _gradient(self, bits: Bits) -> Worth:
        """Worth of each unit at a mask: the mean of the gradients that were taken there."""
        result = self.evaluator.gate_gradient(self._mask(bits), self.gradients % SHARES, SHARES)
        self.gradients += 1
        self.left -= result.full_forward_equivalents
        logger.info(
            "bosch_plus: gradient %d at %d full units, %.1f passes left",
            self.gradients, bits.sum(), max(0.0, self.left),
        )  # fmt: skip
        mean, count = self._worth_at.get(bits.tobytes(), (np.zeros(self.num_units), 0))
        values = np.array(result.values, dtype=np.float64).reshape(-1)
        updated: Worth = (mean * count + values) / (count + 1)
        self._worth_at[bits.tobytes()] = updated, count + 1
        return updated

    def _worth(self, bits: Bits, shares: int = 1) -> Worth:
        """Mean of at least `shares` gradients at a mask, those taken there before included."""
        mean, count = self._worth_at.get(bits.tobytes(), (np.zeros(self.num_units), 0))
        for _ in range(shares - count):
            mean = self._gradient(bits)
        return mean

    def _largest(self, worth: Worth) -> Bits:
        """The mask that keeps the units of greatest worth full."""
        return largest(worth, self.full_units)

    def _measure(self, bits: Bits, phase: Phase, subproblem: str = "gradients") -> bool:
        """Whether the mask is the best so far, and keep it if it is."""
        if bits.tobytes() in self._tried:
            return False
        self._tried.add(bits.tobytes())
        mask = self._mask(bits)
        self.left -= 1
        if not hasattr(self, "best"):
            self.best = _Incumbent(mask, self.evaluator.evaluate(mask, phase, subproblem))
            won = True
        else:
            evaluation = self.evaluator.evaluate(
                mask, phase, subproblem, can_win=self.best.beaten_by
            )
            won = not evaluation.is_bound and self.best.beaten_by(*evaluation.rank)
            if won:
                self.best = _Incumbent(mask, evaluation)
        if won:
            self._failures[:] = 0
            logger.info(
                "bosch_plus: %s: best mask so far, score %.4f, log-likelihood %.4f, "
                "%.1f passes left",
                subproblem, *self.best.evaluation.rank, max(0.0, self.left),
            )  # fmt: skip
        return won

    def _eliminated(self, bits: Bits, passes: float) -> Bits:
        """Slide the units of least worth down to the budget, with fresh gradients before each step.

        Each step leaves the same share of the units that are full. Where `passes` allow it,
        gradients over several shares of the examples are averaged.
        """
        surplus = int(bits.sum()) - self.full_units
        steps, shares = min(_STEPS, math.ceil(math.sqrt(surplus))), 1
        if self.gradient_cost > 0:
            steps = min(steps, max(1, int(passes / self.gradient_cost)))
            shares = min(SHARES, max(1, int(0.6 * passes / self.gradient_cost / max(1, steps))))
        start = int(bits.sum())
        running = _RunningWorth(self.num_units)
        for step in range(1, steps + 1):
            worth = running.add(self._worth(bits, shares))
            rest = self.full_units
            if step < steps and rest > 0:
                rest = round(start * (rest / start) ** (step / steps))
            full = np.flatnonzero(bits)
            order = full[np.lexsort((self._rng.permutation(len(full)), worth[full]))]
            bits = bits.copy()
            bits[order[: len(full) - rest]] = False
        return bits

    def _exchanged(self, bits: Bits, most: int) -> Bits:
        """Exchange up to `most` pairs, then half as many, as long as gradients promise a gain."""
        while most >= 1 and self.left >= 1 + self.gradient_cost:
            worth = self._worth(bits)
            gains, losses = self._ordered(bits, worth)
            # Units that can stand in for each other all promise the same gain: take some of them.
            pool = gains[: 2 * most]
            pool = pool[worth[pool] > (worth[losses[0]] if len(losses) else 0.0)]
            chosen = np.sort(self._rng.permutation(len(pool))[:most])
            gains, losses = pool[chosen], losses[: len(chosen)]
            gains = gains[: len(losses)]
            better = worth[gains] > worth[losses]
            if not better.any():
                break
            bits = _exchange(bits, losses[better], gains[better])
            most //= 2
        return bits

    def _ordered(self, bits: Bits, worth: Worth) -> tuple[Units, Units]:
        """Sliding units of greatest worth first, full units of least worth first."""
        gains, losses = np.flatnonzero(~bits), np.flatnonzero(bits)
        return (
            gains[np.argsort(-worth[gains], kind="stable")],
            losses[np.lexsort((self._rng.permutation(len(losses)), worth[losses]))],
        )

    def _swap(self) -> Bits | None:
        """The most promising swap of two units of the best mask, among those not tried."""
        bits = self._bits
        worth = self._worth(bits)
        gains, losses = np.flatnonzero(~bits), np.flatnonzero(bits)
        if not len(gains) or not len(losses):
            return None
        penalty = _FAILURE * float(np.abs(worth[losses]).mean())
        expected = (worth - penalty * self._failures)[gains][:, None]
        expected = expected - (worth + penalty * self._failures)[losses]
        order = np.argsort(-expected, axis=None, kind="stable")
        for index in order:
            gain, loss = divmod(int(index), len(losses))
            pair = losses[loss : loss + 1], gains[gain : gain + 1]
            child = _exchange(bits, *pair)
            if child.tobytes() not in self._tried:
                self._failures[pair[0]] += 1
                self._failures[pair[1]] += 1
                return child
        return None

    def _kick(self) -> Bits | None:
        """Some units exchanged at random, then exchanges that gradients propose."""
        bits = self._bits
        most = min(self.full_units, self.num_units - self.full_units)
        if most < 2:
            return None
        count = 1 + int(self._rng.integers(1, max(2, most // 8)))
        losses = self._rng.choice(np.flatnonzero(bits), count, replace=False)
        gains = self._rng.choice(np.flatnonzero(~bits), count, replace=False)
        return self._exchanged(_exchange(bits, losses, gains), max(1, count))

    def _regrowth(self) -> Bits | None:
        """Sliding units added at random beyond the budget, then elimination back to it."""
        sliding = np.flatnonzero(~self._bits)
        if len(sliding) == 0 or self.full_units == 0:
            return None
        count = math.ceil(len(sliding) * self._rng.choice([0.125, 0.25, 0.5]))
        bits = self._bits.copy()
        bits[self._rng.choice(sliding, count, replace=False)] = True
        return self._eliminated(bits, min(4 * self.gradient_cost, self.left - 1))


class _RunningWorth:
    """Mean worth of each unit over the steps in a row whose gradients agree on it.

    A gradient of one share of the examples is noisy, so that a mean over shares is better. But a
    unit whose substitutes slid is worth more than before: its mean starts anew.
    """

    def __init__(self, units: int) -> None:
        self._mean = np.zeros(units)
        self._count = np.zeros(units)

    def add(self, worth: Worth) -> Worth:
        larger = np.maximum(np.abs(worth), np.abs(self._mean))
        agree = np.abs(worth - self._mean) <= _AGREEMENT * larger
        self._count = np.where(agree, self._count, 0) + 1
        self._mean = np.where(agree, self._mean + (worth - self._mean) / self._count, worth)
        return self._mean


def _exchange(bits: Bits, losses: Units, gains: Units) -> Bits:
    changed = bits.copy()
    changed[losses] = False
    changed[gains] = True
    return changed
