"""95 % intervals of scores, losses and their differences.

A score lies in [0, 1]. A benchmark's score is the mean over its subtasks, each a task at a length,
of the mean over the subtask's samples. For few samples the intervals of scores are exact or wider;
studies/coverage.py simulates how often each covers the true value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Values = npt.NDArray[np.float64]

_TAIL = 0.025
LEVEL = 2 * _TAIL
# So few losses have no interval, since they often are of only one of two kinds of documents.
_TOO_FEW = 4
# (count, tail): with fewer losses Student's interval has this tail; with skewed values the usual
# one covers less.
_SKEWED = ((30, 0.0025), (60, 0.005), (200, 0.01))
# From this many samples of the smallest subtask on, intervals of unequal subtasks are combined.
_LARGE = 100
_FLIPS = 4000
_CHUNK = 500


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    mean: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A mean with the ends of its interval, which are None if there are too few values."""

    mean: float
    low: float | None
    high: float | None


class Comparison(NamedTuple):
    """First model against second: the difference of scores and a p-value.

    `p_value` is that of the hypothesis that both answer equally well.
    """

    difference: Interval
    p_value: float


def share(mean: float, count: float, tail: float = _TAIL) -> Interval:
    """Clopper and Pearson's exact interval (1934) for a share of `count` samples.

    For partial scores in [0, 1] it is conservative, since no values vary more than 0 and 1. With a
    `tail` of 0.05 each end is a one-sided limit of 95 %.
    """
    hits = mean * count
    low = float(special.betaincinv(hits, count - hits + 1, tail)) if hits > 1e-9 else 0.0
    misses = count - hits
    high = float(special.betaincinv(hits + 1, misses, 1 - tail)) if misses > 1e-9 else 1.0
    return Interval(mean, low, high)


def mean_score(means: Sequence[float], counts: Sequence[float]) -> Interval:
    """The unweighted mean of independent subtasks.

    They count as one task in which each has as many samples as the smallest: by Hoeffding (1956) a
    sum of samples with different probabilities varies no more than one with equal probabilities.
    Large subtasks of unequal size are combined from their intervals, by MOVER (Zou and Donner
    2008).
    """
    if _is_pooled(counts):
        return share(sum(means) / len(means), len(counts) * min(counts))
    return _mover([share(mean, count) for mean, count in zip(means, counts, strict=True)], 0.0)


def compare(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], seed: int = 0
) -> Comparison:
    """Two models on the same samples, subtask by subtask.

    The interval of the difference combines those of the gains and of the losses. The p-value comes
    from flipping the signs of the samples' differences; if it is not significant, the interval
    contains 0.
    Raises ValueError if the numbers of samples differ or are 0, or a score is not finite.
    """
    a = [np.asarray(subtask, dtype=np.float64) for subtask in first]
    b = [np.asarray(subtask, dtype=np.float64) for subtask in second]
    if [len(subtask) for subtask in a] != [len(subtask) for subtask in b]:
        raise ValueError("the models have different samples")
    if not a or not all(len(part) and np.isfinite(part).all() for part in (*a, *b)):
        raise ValueError("a subtask has no samples, or scores that are not finite")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    difference = _mean_difference(differences)
    p_value = _sign_flips(differences, seed)
    if p_value >= LEVEL:
        difference = _including(difference, 0.0)
    return Comparison(difference, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979) of several comparisons."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def student(values: npt.ArrayLike) -> Estimate:
    """Student's interval of the mean of independent values [n]; fewer than five have none.

    For fewer than 30 values it is the 99.5 % interval, for fewer than 60 that of 99 %, for fewer
    than 200 that of 98 %: with values as skewed as a log-normal of sigma 1 these cover in 93 % of
    cases.
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) <= _TOO_FEW:
        return Estimate(mean, None, None)
    half = _skewed_t(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(mean, mean - half, mean + half)


def _is_pooled(counts: Sequence[float]) -> bool:
    return max(counts) <= 2 * min(counts) or min(counts) < _LARGE


def _mover(parts: Sequence[Interval], lowest: float) -> Interval:
    """The mean of independent estimates, whose distances to the limits add in squares (MOVER)."""
    mean = sum(part.mean for part in parts) / len(parts)
    below = math.sqrt(sum((part.mean - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.mean) ** 2 for part in parts)) / len(parts)
    return Interval(mean, max(lowest, mean - below), min(1.0, mean + above))


def _mean_difference(subtasks: Sequence[Values]) -> Interval:
    counts = [len(subtask) for subtask in subtasks]
    gains = [float(np.maximum(subtask, 0.0).mean()) for subtask in subtasks]
    losses = [float(np.maximum(-subtask, 0.0).mean()) for subtask in subtasks]
    if _is_pooled(counts):
        total = len(counts) * min(counts)
        return _signed(sum(gains) / len(gains), sum(losses) / len(losses), total)
    return _mover(list(map(_signed, gains, losses, counts)), -1.0)


def _signed(gains: float, losses: float, count: float) -> Interval:
    """Mean of values in [-1, 1] from those of the positive and the negative parts, by MOVER."""
    up, down = share(gains, count), share(losses, count)
    # No sample is both won and lost: the parts are correlated like two cells of a multinomial.
    p, q = ((part * count + 0.5) / (count + 1.5) for part in (gains, losses))
    correlation = -math.sqrt(p * q / ((1 - p) * (1 - q)))
    below = _distance(gains - up.low, down.high - losses, correlation)
    above = _distance(up.high - gains, losses - down.low, correlation)
    mean = gains - losses
    return Interval(mean, max(-1.0, mean - below), min(1.0, mean + above))


def _including(interval: Interval, value: float) -> Interval:
    return Interval(interval.mean, min(interval.low, value), max(interval.high, value))


def _distance(first: float, second: float, correlation: float) -> float:
    """Distance of a difference from its limit, from the distances of its two parts."""
    return math.sqrt(first**2 + second**2 - 2 * correlation * first * second)


def _sign_flips(subtasks: Sequence[Values], seed: int) -> float:
    """Two-sided p-value of the randomisation test, which flips whole differences; >= 1 / 4,001."""
    weighted = np.concatenate([subtask / len(subtask) for subtask in subtasks])
    weighted = weighted[weighted != 0]
    if not len(weighted):
        return 1.0
    reached = abs(float(weighted.sum())) * (1 - 1e-9)
    rng = np.random.default_rng(seed)
    extreme = 0
    for _ in range(_FLIPS // _CHUNK):
        signs = rng.integers(0, 2, (_CHUNK, len(weighted)), dtype=np.int8) * 2.0 - 1.0
        extreme += int((np.abs(signs @ weighted) >= reached).sum())
    return (extreme + 1) / (_FLIPS + 1)


def _skewed_t(freedom: int) -> float:
    tail = next((tail for count, tail in _SKEWED if freedom + 1 < count), _TAIL)
    return float(special.stdtrit(freedom, 1 - tail))
