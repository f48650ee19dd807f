"""Regret per pass of the searches on synthetic landscapes, whose optimum on budget is known.

    python -m studies.landscapes --units 48,320 --budgets 4,10

A regret of 0 is the optimum, 1 the mean of random masks on budget. At the same kappa bosch may
spend 2 kappa L evaluations, bosch_plus kappa L / 10. Passes are full-forward equivalents, anchors
included. `bosch` solves large sub-problems by (1+1), which costs less time here than NOMAD.

A landscape stands in for a model: it has a score in steps of 1/64, a log-likelihood, and gradients
of the gates, with different noise for each share of the examples. Most are sums over groups of
units, w_g phi_g(which units of g are full); `rugged` has random pairwise interactions.

    additive    groups of one unit
    redundant   any one unit of a group is enough
    graded      each further unit of a group adds less
    pairs       both units of a pair are needed
    chains      all four units of a group are needed
    traps       all four units are best, but one to three are worse than none
    mixed       redundant groups, pairs and single units together
    rugged      a_i z_i + J_ij z_i z_j, six random J for each unit, half of them negative
    thresholds  three of six units are needed, and enough
    one_of_two  exactly one unit of a pair, beside single units
    xor         an odd number of three units
    either      one of two chains of two units
    layers      a whole layer is best, but a part of it is worse than none
    heavy       single units; each share of the examples weighs them by heavy-tailed factors
    by_layer    graded within a layer, whose factor its units share, in weights and in noise
    anew        groups of one to five units, each with a random table that is 0 with none full

N units, F of them full. Gradients are differences by one flip, the slopes of the score's
multilinear form.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from statistics import mean

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation, GateGradient
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from studies import studied_model

Bits = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

HEADS = 8
RATIO = 0.75
QUANTUM = 1 / 64
GRADIENT_PASSES = 4.5  # full-forward equivalents of one gradient over all examples
_NOISE = 0.2
_SHAPES: dict[str, list[list[float]]] = {
    "additive": [[0, 1]],
    "redundant": [[0, 1, 1, 1, 1]],
    "graded": [[0, 0.5, 0.71, 0.87, 1]],
    "pairs": [[0, 0, 1]],
    "chains": [[0, 0, 0, 0, 1]],
    "traps": [[0.6, 0.4, 0.2, 0, 1]],
    "mixed": [[0, 1, 1, 1, 1], [0, 0, 1], [0, 1]],
    "rugged": [],
    "thresholds": [[0, 0, 0, 1, 1, 1, 1]],
    "one_of_two": [[0, 1, 0], [0, 1]],
    "xor": [[0, 1, 0, 1]],
    "either": [],
    "layers": [[0.6 - 0.6 * full / 7 for full in range(8)] + [1]],
    "heavy": [[0, 1]],
    "by_layer": [[0, 0.25, 0.45, 0.6, 0.72, 0.82, 0.9, 0.96, 1]],
    "anew": [],
}
NAMES = tuple(_SHAPES)
METHODS = ("bosch_plus", "bosch", "rand")
_BY_LAYER = ("layers", "by_layer")
# By the bits a, b, c, d of a group's full units: 1 if a and b, or c and d, are full.
_EITHER = [float(a & b | c & d) for d in (0, 1) for c in (0, 1) for b in (0, 1) for a in (0, 1)]


class Landscape:
    """A scorer with gradients, computed from numbers; `seed` draws weights, groups and noise."""

    def __init__(self, name: str, units: int, seed: int = 0) -> None:
        self.num_layers, self.num_key_value_heads = units // HEADS, HEADS
        self.quantum = QUANTUM
        self.full_units = units - swa_budget(units, RATIO)
        rng = np.random.default_rng([seed, units, NAMES.index(name)])
        self.form = (
            _Pairwise(units, rng)
            if name == "rugged"
            else Groups(_tables(name, units, rng), units, rng, in_order=name in _BY_LAYER)
        )
        self.noise = _noise_of_shares(name, units, np.random.default_rng(seed + 1))
        ends = [np.zeros(units, dtype=np.bool_), np.ones(units, dtype=np.bool_)]
        self.low, self.high = (self.form.value(end) for end in ends)
        self.best = self.form.optimum(self.full_units)
        random_values = [
            self.form.value(rng.permutation(units) < self.full_units) for _ in range(200)
        ]
        self.mean = float(np.mean(random_values))

    def regret(self, mask: HeadMask) -> float:
        """0 at the optimum on budget, 1 at the mean of random masks on budget."""
        value = self.form.value(mask.is_full.reshape(-1))
        return (self.best - value) / (self.best - self.mean)

    def evaluate(self, mask: HeadMask) -> Evaluation:
        """Costs one pass."""
        value = self.form.value(mask.is_full.reshape(-1))
        value = (value - self.low) / (self.high - self.low)
        score = float(np.clip(np.floor(value / QUANTUM + 1e-9) * QUANTUM, 0.0, 1.0))
        return Evaluation(score, 4 * (value - 2))

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Differences by one flip at `mask`, each with a factor that depends on unit and share."""
        flips = self.form.flips(mask.is_full.reshape(-1)) / (self.high - self.low)
        flips = flips * self.noise[share % 8]
        return GateGradient(
            flips.reshape(mask.is_full.shape).tolist(), 0.0, self.gradient_passes(share, shares)
        )

    def gradient_passes(self, share: int = 0, shares: int = 1) -> float:
        return GRADIENT_PASSES / min(shares, 8)


def _tables(name: str, units: int, rng: np.random.Generator) -> list[Values]:
    """For each group, the value of each set of its full units, by the set's bits."""
    tables: list[Values] = []
    covered = 0
    if name == "anew":
        # Tables take a varying number of draws; the weights that follow must not depend on it.
        rng = np.random.default_rng(rng.integers(2**31))
    while covered < units:
        if name == "either":
            table = np.array(_EITHER)
        elif name == "anew":
            table = rng.normal(size=2 ** int(rng.integers(1, 6))) ** 2
            table[0], table[-1] = 0.0, 1 + table[-1]
        else:
            shapes = _SHAPES[name]
            shape = np.array(shapes[len(tables) % len(shapes)], dtype=np.float64)
            table = shape[[number.bit_count() for number in range(2 ** (len(shape) - 1))]]
        # The last group has the remaining units.
        tables.append(table[: 2 ** (units - covered)])
        covered += _size(tables[-1])
    return tables


def _size(table: Values) -> int:
    return len(table).bit_length() - 1


def _noise_of_shares(name: str, units: int, rng: np.random.Generator) -> Values:
    """Factor [8, N] of each unit's slope in each share of the examples."""
    if name == "heavy":
        # The mean over eight examples of factors with mean 1.
        factors = rng.lognormal(-2, 2, size=(8, 8, units)).mean(axis=1)
        return np.asarray(factors / factors.mean(axis=0))
    noise: Values = 1 + rng.normal(size=(8, units)) * _NOISE
    if name == "by_layer":
        noise += np.repeat(rng.normal(size=(8, units // HEADS)) * _NOISE, HEADS, axis=1)
    return noise


class Groups:
    """Sum over groups of w_g phi_g(full units of g)."""

    def __init__(
        self, tables: list[Values], units: int, rng: np.random.Generator, in_order: bool
    ) -> None:
        order = np.arange(units) if in_order else rng.permutation(units)
        sizes = [_size(table) for table in tables]
        self.group_of = np.empty(units, dtype=np.int64)
        self.group_of[order] = np.repeat(np.arange(len(tables)), sizes)
        self.bit_of = np.empty(units, dtype=np.int64)
        self.bit_of[order] = np.concatenate([1 << np.arange(size) for size in sizes])
        self.weights = rng.exponential(size=len(tables)) + 0.2
        self.phi = np.zeros((len(tables), max(len(table) for table in tables)))
        self.tables = tables
        for row, weight, table in zip(self.phi, self.weights, tables, strict=True):
            row[: len(table)] = table * weight

    def _codes(self, full: Bits) -> npt.NDArray[np.int64]:
        weights = np.where(full, self.bit_of, 0)
        return np.bincount(self.group_of, weights=weights).astype(np.int64)

    def value(self, full: Bits) -> float:
        codes = self._codes(full)
        return float(self.phi[np.arange(len(codes)), codes].sum())

    def flips(self, full: Bits) -> Values:
        group, bit = self.group_of, self.bit_of
        others = self._codes(full)[group] & ~bit
        difference: Values = self.phi[group, others | bit] - self.phi[group, others]
        return difference

    def optimum(self, budget: int) -> float:
        """Knapsack over the groups: the number of full units in each."""
        best = np.full(budget + 1, -np.inf)
        best[0] = 0.0
        for weight, table in zip(self.weights, self.tables, strict=True):
            by_count = np.full(_size(table) + 1, -np.inf)
            np.maximum.at(by_count, [n.bit_count() for n in range(len(table))], table)
            following = np.full(budget + 1, -np.inf)
            for count in range(min(len(by_count), budget + 1)):
                gained = best[: budget + 1 - count] + weight * by_count[count]
                following[count:] = np.maximum(following[count:], gained)
            best = following
        return float(best[budget])


class _Pairwise:
    """a_i z_i + J_ij z_i z_j; the optimum is the best of long annealings with all flips known."""

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
    """The landscape, made only once."""
    return Landscape(name, units, seed)


def regret_and_passes(method: str, name: str, units: int, budget: int) -> tuple[float, float]:
    """Means over the seeds; small landscapes differ more from each other."""
    regrets, passes = [], []
    for seed in range(max(3, 768 // units)):
        scorer = landscape(name, units, seed)
        settings = SearchSettings(RATIO, "one_plus_one", budget_per_layer=budget, seed=seed)
        run = run_method(method, scorer, settings)
        regrets.append(scorer.regret(run.mask))
        passes.append(run.costs["full_forward_equivalents"])
    return mean(regrets), mean(passes)


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=_numbers, default=[48, 320], help="multiples of 8")
    parser.add_argument("--budgets", type=_numbers, default=[4, 10], help="κ")
    parser.add_argument("--names", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    chosen = parser.parse_args()
    for units in chosen.units:
        for budget in chosen.budgets:
            print(f"## {units} units, κ = {budget}: regret and passes\n")
            rows = []
            for name in chosen.names:
                found = [regret_and_passes(one, name, units, budget) for one in chosen.methods]
                rows.append([name, *(f"{regret:.3f}, {cost:.0f}" for regret, cost in found)])
            print(studied_model.table(["landscape", *chosen.methods], rows), flush=True)


if __name__ == "__main__":
    main()
