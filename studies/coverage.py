"""Simulated coverage: how often the 95 % intervals of scores and losses hold the true value.

    python -m studies.coverage --draws 2000

Prints the least coverage of each kind of sample, over 5 to 500 samples and scores from 0 to 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bosch.analysis.intervals import (
    Comparison,
    Estimate,
    Interval,
    compare,
    mean_score,
    student,
)
from studies.studied_model import table

Values = npt.NDArray[np.float64]

# Losses of documents, each with mean 1.
LOSSES: dict[str, Callable[[np.random.Generator, int], Values]] = {
    "normal": lambda rng, n: rng.normal(1.0, 1.0, n),
    "uniform": lambda rng, n: rng.uniform(0.0, 2.0, n),
    "exponential": lambda rng, n: rng.exponential(1.0, n),
    "gamma, shape 4": lambda rng, n: rng.gamma(4.0, 0.25, n),
    "log-normal, sigma 0.5": lambda rng, n: rng.lognormal(-0.125, 0.5, n),
    "log-normal, sigma 1": lambda rng, n: rng.lognormal(-0.5, 1.0, n),
    "two kinds, as many of each": lambda rng, n: rng.choice([0.0, 2.0], n) + rng.normal(0, 0.1, n),
}
# Pareto exponents so small that intervals of a mean fail, while those of differences hold.
HEAVY_TAILS = (1.5, 2.0, 2.5, 3.0)
MEANS = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0)
COUNTS = (5, 12, 48, 120, 500)
DOCUMENTS = (5, 6, 10, 12, 30, 60, 100, 200)
COMPARED = ((0.9, 0.8), (0.97, 0.97), (0.05, 0.1), (0.3, 0.02), (1.0, 1.0), (0.02, 0.02))
# Scores of samples in [0, 1] with a given mean.
SCORES: dict[str, Callable[[np.random.Generator, float, tuple[int, ...]], Values]] = {
    "right or wrong": lambda rng, mean, shape: (rng.random(shape) < mean).astype(np.float64),
    "four parts": lambda rng, mean, shape: rng.binomial(4, mean, shape) / 4,
    "beta": lambda rng, mean, shape: rng.beta(0.4 * mean + 1e-9, 0.4 * (1 - mean) + 1e-9, shape),
}


def score_coverage(
    truths: Sequence[float], counts: Sequence[int], kind: str, draws: int, seed: int = 0
) -> float:
    """Coverage of the mean score of subtasks with these true scores and numbers of samples."""
    rng = np.random.default_rng(seed)

    def intervals() -> Iterator[Interval]:
        for _ in range(draws):
            pairs = zip(truths, counts, strict=True)
            yield mean_score([float(SCORES[kind](rng, p, (n,)).mean()) for p, n in pairs], counts)

    return _coverage(intervals(), float(np.mean(truths)))


def loss_coverage(kind: str, count: int, draws: int, seed: int = 0) -> float:
    """Coverage of Student's interval of the mean loss of `count` documents."""
    rng = np.random.default_rng(seed)
    return _coverage((student(LOSSES[kind](rng, count)) for _ in range(draws)), 1.0)


def heavy_tail_coverage(alpha: float, count: int, draws: int, seed: int = 0) -> tuple[float, float]:
    """Coverage for Pareto losses of mean 1: of their mean, and of the difference of two models."""
    rng = np.random.default_rng(seed)
    losses = (rng.pareto(alpha, (draws, 2, count)) + 1) * (alpha - 1) / alpha
    mean = _coverage((student(first) for first, _ in losses), 1.0)
    return mean, _coverage((student(first - second) for first, second in losses), 0.0)


def comparisons(
    scores: tuple[float, float], noise: float, subtasks: int, count: int, draws: int, seed: int = 0
) -> list[Comparison]:
    """Comparisons of two models with these true scores, whose answers depend on shared hardness.

    `noise` is the share of samples on which the second model's answer is independent of it.
    """
    rng, results = np.random.default_rng(seed), []
    for draw in range(draws):
        hardness = rng.random((subtasks, count))
        second_hardness = np.where(
            rng.random(hardness.shape) < noise, rng.random(hardness.shape), hardness
        )
        first, second = (
            (hardness < scores[0]).astype(float),
            (second_hardness < scores[1]).astype(float),
        )
        results.append(compare(list(first), list(second), seed=draw))
    return results


def comparison_coverage(
    results: Sequence[Comparison], scores: tuple[float, float]
) -> tuple[float, float]:
    """Coverage of the difference, and the share of p < 0.05."""
    difference = _coverage((result.difference for result in results), scores[0] - scores[1])
    return difference, float(np.mean([result.p_value < 0.05 for result in results]))


def _coverage(intervals: Iterable[Interval | Estimate], truth: float) -> float:
    covered = []
    for _, low, high in intervals:
        assert low is not None and high is not None
        covered.append(low - 1e-12 <= truth <= high + 1e-12)
    return float(np.mean(covered))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    rows: list[list[object]] = []
    for kind in SCORES:
        rows.append([f"mean score, {kind}", min(
            score_coverage([mean], [count], kind, draws)
            for mean, count in itertools.product(MEANS, COUNTS)
        )])  # fmt: skip
    for kind in LOSSES:
        rows.append([f"mean loss, {kind}", min(loss_coverage(kind, n, draws) for n in DOCUMENTS)])
    for alpha in HEAVY_TAILS:
        found = [heavy_tail_coverage(alpha, count, draws) for count in DOCUMENTS]
        rows.append([f"mean loss, Pareto {alpha}", min(mean for mean, _ in found)])
        rows.append([f"difference of losses, Pareto {alpha}", min(pair for _, pair in found)])
    for scores, noise in itertools.product(COMPARED, (0.02, 0.3, 1.0)):
        results = comparisons(scores, noise, 4, 48, draws // 5)
        difference, rejected = comparison_coverage(results, scores)
        name = f"scores of {scores[0]} and {scores[1]}, noise {noise}"
        rows.append([f"difference of {name}", difference])
        rows.append([f"share of p < 0.05, {name}", rejected])
    print(table(["", "least coverage"], rows))


if __name__ == "__main__":
    main()
