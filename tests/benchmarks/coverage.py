"""Simulated coverage: how often intervals contain the true value; `test_coverage.py` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bosch.analysis.intervals import (
    Comparison,
    Estimate,
    Interval,
    compare,
    crossed_difference,
    crossed_mean,
    crossed_test,
    mean_score,
    student,
)

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
) -> tuple[float, float | None, float]:
    """Coverage of the difference, of the ratio where half have one, and the share of p < 0.05."""
    difference = _coverage((result.difference for result in results), scores[0] - scores[1])
    ratios = [result.ratio for result in results if result.ratio is not None]
    has_few_ratios = len(ratios) < len(results) / 2
    ratio = None if has_few_ratios or not scores[1] else _coverage(ratios, scores[0] / scores[1])
    return difference, ratio, float(np.mean([result.p_value < 0.05 for result in results]))


def seed_coverage(
    score: float, seeds: int, examples: int, draws: int, seed: int = 0, *, is_skewed: bool = False
) -> tuple[float, float]:
    """Coverage of a mean over seeds and examples, and of the difference of two such methods.

    Examples and seeds have normal effects; with `is_skewed` those of examples are log-normal of
    sigma 1.
    """
    rng = np.random.default_rng(seed)
    means, differences = [], []
    for _ in range(draws):
        hardness = rng.normal(0.0, 0.2, examples)
        if is_skewed:
            hardness = rng.lognormal(-0.5, 1.0, examples) - 1.0
        results = [
            score
            + hardness
            + rng.normal(0, 0.1, (seeds, 1))
            + rng.normal(0, 0.1, (seeds, examples))
            for _ in range(2)
        ]
        means.append(crossed_mean(results[0]))
        differences.append(crossed_difference(*results))
    return _coverage(means, score), _coverage(differences, 0.0)


def method_coverage(
    scores: tuple[float, float], seeds: int, samples: int, spread: float, draws: int, seed: int = 0
) -> tuple[float, float, float]:
    """Coverage of a method's mean score over seeds and samples, and of the difference of two.

    Third, the share of p < 0.05. Seeds share a sample's hardness in seven of ten cases; a seed's
    score differs from the method's by a normal of standard deviation `spread`.
    """
    rng = np.random.default_rng(seed)
    means, differences, rejected = [], [], []
    for draw in range(draws):
        hardness = rng.random(samples)

        def answers(score: float, hardness: Values = hardness) -> Values:
            level = np.clip(score + rng.normal(0, spread, (seeds, 1)), 0, 1)
            is_independent = rng.random((seeds, samples)) < 0.3
            seed_hardness = np.where(is_independent, rng.random((seeds, samples)), hardness)
            return (seed_hardness < level).astype(np.float64)

        first, second = map(answers, scores)
        means.append(crossed_mean(first, is_score=True))
        test = crossed_test(first, second, seed=draw)
        differences.append(Estimate(test.mean, test.low, test.high))
        rejected.append(test.p_value < 0.05)
    difference = scores[0] - scores[1]
    return _coverage(means, scores[0]), _coverage(differences, difference), float(np.mean(rejected))


def _coverage(intervals: Iterable[Interval | Estimate], truth: float) -> float:
    covered = [interval.low - 1e-12 <= truth <= interval.high + 1e-12 for interval in intervals]
    return float(np.mean(covered))
