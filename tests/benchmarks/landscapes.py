"""Synthetic scores with interactions between units, whose optimum on budget is known.

A landscape stands in for a model: it has a score in steps of 1/64, a log-likelihood, and gradients
of the gates, each share of the examples with noise of its own. Most are sums over groups of units,
w_g phi(number of full units in g); `rugged` has random pairwise interactions.

    additive    groups of one unit
    redundant   any one unit of a group is enough
    graded      each further unit of a group adds less
    pairs       both units of a pair are needed
    chains      all four units of a group are needed
    traps       all four units are best, but one to three are worse than none
    mixed       redundant groups, pairs and single units together
    rugged      a_i z_i + J_ij z_i z_j, six random J for each unit, half of them negative

N units, F of them full. Gradients are differences by one flip, the slopes of the score's
multilinear form.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation, GateGradient
from bosch.search.evaluator import CanWin

Bits = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

HEADS = 8
RATIO = 0.75
QUANTUM = 1 / 64
_GRADIENT_PASSES = 4.5
_NOISE = 0.2
_SHAPES: dict[str, list[list[float]]] = {
    "additive": [[0, 1]],
    "redundant": [[0, 1, 1, 1, 1]],
    "graded": [[0, 0.5, 0.71, 0.87, 1]],
    "pairs": [[0, 0, 1]],
    "chains": [[0, 0, 0, 0, 1]],
    "traps": [[0.6, 0.4, 0.2, 0, 1]],
    "mixed": [[0, 1, 1, 1, 1], [0, 0, 1], [0, 1]],
}
NAMES = (*_SHAPES, "rugged")


class Landscape:
    """A `GradientScorer` made of numbers; `seed` draws weights, groups and noise."""

    def __init__(self, name: str, units: int, seed: int = 0) -> None:
        self.num_layers, self.num_key_value_heads = units // HEADS, HEADS
        self.quantum = QUANTUM
        self.full_units = units - swa_budget(units, RATIO)
        rng = np.random.default_rng([seed, units, NAMES.index(name)])
        self._form = (
            _Pairwise(units, rng) if name == "rugged" else _Groups(_SHAPES[name], units, rng)
        )
        self._noise = np.random.default_rng(seed + 1).normal(size=(8, units)) * _NOISE
        ends = [np.zeros(units, dtype=np.bool_), np.ones(units, dtype=np.bool_)]
        self._low, self._high = (self._form.value(end) for end in ends)
        self.best = self._form.optimum(self.full_units)
        random = [self._form.value(rng.permutation(units) < self.full_units) for _ in range(200)]
        self.mean = float(np.mean(random))

    def regret(self, mask: HeadMask) -> float:
        """0 at the optimum on budget, 1 at the mean of random masks on budget."""
        value = self._form.value(mask.is_full.reshape(-1))
        return (self.best - value) / (self.best - self.mean)

    def evaluate(
        self, mask: HeadMask, shared_layers: int = 0, *, can_win: CanWin | None = None
    ) -> Evaluation:
        """Costs one pass, half of one where it ends early."""
        value = self._form.value(mask.is_full.reshape(-1))
        value = (value - self._low) / (self._high - self._low)
        score = float(np.clip(np.floor(value / QUANTUM + 1e-9) * QUANTUM, 0.0, 1.0))
        bound = Evaluation(min(1.0, score + 4 * QUANTUM), 0.5 * (value - 4), is_bound=True)
        if can_win is not None and not can_win(bound.score, 4 * value):
            return Evaluation(bound.score, 4 * value, 0.0, 0.5, 1.0, is_bound=True)
        return Evaluation(score, 4 * (value - 2))

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Flips at `mask`, each off by a factor that depends on unit and share."""
        flips = self._form.flips(mask.is_full.reshape(-1)) / (self._high - self._low)
        flips = flips * (1 + self._noise[share % 8])
        return GateGradient(
            flips.reshape(mask.is_full.shape).tolist(), 0.0, self.gradient_passes(share, shares)
        )

    def gradient_passes(self, share: int = 0, shares: int = 1) -> float:
        return _GRADIENT_PASSES / min(shares, 8)


class _Groups:
    """Sum over groups of w_g phi(c_g), c_g the full units of group g."""

    def __init__(self, shapes: list[list[float]], units: int, rng: np.random.Generator) -> None:
        order, start, number = rng.permutation(units), 0, 0
        self.members: list[npt.NDArray[np.int64]] = []
        self.shapes: list[Values] = []
        while start < units:
            shape = np.array(shapes[number % len(shapes)][: units - start + 1], dtype=np.float64)
            self.members.append(order[start : start + len(shape) - 1])
            self.shapes.append(shape)
            start, number = start + len(shape) - 1, number + 1
        self.weights = rng.exponential(size=len(self.members)) + 0.2
        self.group_of = np.empty(units, dtype=np.int64)
        widest = max(len(shape) for shape in self.shapes)
        self.phi = np.zeros((len(self.shapes), widest + 1))
        for number, (members, shape) in enumerate(zip(self.members, self.shapes, strict=True)):
            self.group_of[members] = number
            self.phi[number, : len(shape)] = shape * self.weights[number]

    def _counts(self, full: Bits) -> npt.NDArray[np.int64]:
        return np.bincount(self.group_of, weights=full, minlength=len(self.members)).astype(
            np.int64
        )

    def value(self, full: Bits) -> float:
        counts = self._counts(full)
        return float(self.phi[np.arange(len(counts)), counts].sum())

    def flips(self, full: Bits) -> Values:
        others = self._counts(full)[self.group_of] - full
        difference: Values = self.phi[self.group_of, others + 1] - self.phi[self.group_of, others]
        return difference

    def optimum(self, budget: int) -> float:
        """Knapsack over the groups: how many full units each gets."""
        best = np.full(budget + 1, -np.inf)
        best[0] = 0.0
        for weight, shape in zip(self.weights, self.shapes, strict=True):
            following = np.full(budget + 1, -np.inf)
            for count in range(min(len(shape), budget + 1)):
                gained = best[: budget + 1 - count] + weight * shape[count]
                following[count:] = np.maximum(following[count:], gained)
            best = following
        return float(best[budget])


class _Pairwise:
    """a_i z_i + J_ij z_i z_j; the optimum is the best of long annealings that know all flips."""

    def __init__(self, units: int, rng: np.random.Generator) -> None:
        self.linear = rng.exponential(size=units)
        self.pairs = np.zeros((units, units))
        for _ in range(3):
            other = rng.permutation(units)
            self.pairs[np.arange(units), other] += rng.normal(size=units)
        self.pairs += self.pairs.T
        np.fill_diagonal(self.pairs, 0.0)
        self.seed = int(rng.integers(2**31))

    def value(self, full: Bits) -> float:
        return float(self.linear[full].sum() + self.pairs[np.ix_(full, full)].sum() / 2)

    def flips(self, full: Bits) -> Values:
        slopes: Values = self.linear + self.pairs @ full
        return slopes

    def optimum(self, budget: int) -> float:
        return max(self._annealed(budget, np.random.default_rng([self.seed, i])) for i in range(3))

    def _annealed(self, budget: int, rng: np.random.Generator) -> float:
        units = len(self.linear)
        full = rng.permutation(units) < budget
        slopes, steps = self.flips(full), 150 * units
        value = best = self.value(full)
        inside, outside = np.flatnonzero(full), np.flatnonzero(~full)
        picks = rng.random((steps, 3))
        for step, (a, b, chance) in enumerate(picks):
            i, j = int(a * len(inside)), int(b * len(outside))
            off, on = inside[i], outside[j]
            gain = slopes[on] - slopes[off] - self.pairs[on, off]
            if gain > 0 or chance < np.exp(gain / (2.0 * (1 - step / steps) ** 2 + 1e-9)):
                inside[i], outside[j] = on, off
                slopes += self.pairs[on] - self.pairs[off]
                value += gain
                best = max(best, value)
        return float(best)


@cache
def landscape(name: str, units: int, seed: int = 0) -> Landscape:
    """The landscape, made once."""
    return Landscape(name, units, seed)
