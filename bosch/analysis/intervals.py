"""95 % intervals of scores, losses and their differences, and the losses that samples can detect.

A score lies in [0, 1]. A benchmark's score is the mean over its subtasks, each a task at a length,
of the mean over the subtask's samples. For few samples the intervals of scores are exact or wider;
tests/benchmarks/coverage.py simulates how often each covers the true value.

S seeds, E examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

Values = npt.NDArray[np.float64]

_TAIL = 0.025
LEVEL = 2 * _TAIL
_POWER = 0.8
# So few losses have no interval, since they often are of only one of two kinds of documents.
_TOO_FEW = 4
# (count, tail): with fewer losses Student's interval has this tail; with skewed values the usual
# one covers less.
_SKEWED = ((30, 0.0025), (60, 0.005), (200, 0.01))
# With fewer seeds or examples than this, 98 % intervals are used, for the same reason.
_FEW = 10
# From this many samples of the smallest subtask on, intervals of unequal subtasks are combined.
_LARGE = 100
_FLIPS = 4000
_CHUNK = 500
# A ratio whose interval reaches further counts as unbounded.
_HIGHEST_RATIO = 1e4


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

    @classmethod
    def around(cls, mean: float, half: float | None) -> Estimate:
        """The estimate with this half-width."""
        return cls(mean, None, None) if half is None else cls(mean, mean - half, mean + half)

    @property
    def for_charts(self) -> Interval:
        """The interval with the mean in place of missing ends."""
        mean, low, high = self
        return Interval(mean, mean if low is None else low, mean if high is None else high)

    def within(self, lowest: float, highest: float) -> Estimate:
        """The estimate with its ends clipped to the range of the mean."""
        if self.low is None or self.high is None:
            return self
        return Estimate(self.mean, max(lowest, self.low), min(highest, self.high))


class Comparison(NamedTuple):
    """First model against second: difference of scores, first over second, and a p-value.

    `ratio` is None if too few samples, or too low a second score, leave it unbounded. `p_value` is
    that of the hypothesis that both answer equally well. `visible_loss` is the result of the
    function of this name.
    """

    difference: Interval
    ratio: Interval | None
    p_value: float
    visible_loss: float | None


class Documents(list[float]):
    """Mean scores of documents, weighted by `counts`, usually their numbers of samples."""

    def __init__(self, means: Iterable[float], counts: Iterable[float]) -> None:
        super().__init__(means)
        self.counts = tuple(counts)


def mean_of(scores: Sequence[float]) -> float:
    """The mean over all samples."""
    if not isinstance(scores, Documents):
        return sum(scores) / len(scores)
    return float(np.average(scores, weights=scores.counts))


def effective_count(scores: Sequence[float]) -> float:
    """Effective number of documents (Kish 1965): fewer if a few documents have most samples."""
    if not isinstance(scores, Documents):
        return len(scores)
    counts = np.array(scores.counts, np.float64)
    return float(counts.sum() ** 2 / (counts @ counts))


def weights_of(scores: Sequence[float]) -> Values:
    """Weights of the documents, with a mean of 1."""
    counts = scores.counts if isinstance(scores, Documents) else np.ones(len(scores))
    return np.asarray(counts, np.float64) / np.mean(counts)


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

    The interval of the difference combines those of the gains and of the losses; that of the ratio
    contains every r for which first - r second may be 0 (Fieller 1954). The p-value comes from
    flipping the signs of the samples' differences; if it is not significant, the intervals contain
    equality (0 or 1). A document (`Documents`) counts once, weighted by its samples.
    Raises ValueError if the numbers of samples differ or are 0, or a score is not finite.
    """
    a = [np.asarray(subtask, dtype=np.float64) for subtask in first]
    b = [np.asarray(subtask, dtype=np.float64) for subtask in second]
    if [len(subtask) for subtask in a] != [len(subtask) for subtask in b]:
        raise ValueError("the models have different samples")
    if not a or not all(len(part) and np.isfinite(part).all() for part in (*a, *b)):
        raise ValueError("a subtask has no samples, or scores that are not finite")
    counts = [effective_count(subtask) for subtask in first]
    weights = [weights_of(subtask) for subtask in first]
    differences = [(x - y) * w for x, y, w in zip(a, b, weights, strict=True)]
    difference = _mean_difference(differences, counts)
    baselines = [float((y * w).mean()) for y, w in zip(b, weights, strict=True)]
    baseline = mean_score(baselines, counts)
    ratio = _ratio(difference, baseline, _correlation(differences, b))
    p_value = _sign_flips(differences, seed)
    if p_value >= LEVEL:
        difference, ratio = _including(difference, 0.0), ratio and _including(ratio, 1.0)
    gains = sum(float(np.maximum(d, 0.0).mean()) for d in differences) / len(differences)
    return Comparison(difference, ratio, p_value, visible_loss(counts, gains))


def visible_loss(counts: Sequence[float], gains: float = 0.0) -> float | None:
    """The smallest loss of score that paired samples detect at 5 % with a power of 80 %.

    `counts` are the samples of subtasks, which have equal weights and lose the same share. `gains`
    is the share of samples that the model wins meanwhile, which hide losses (Connor 1987). None if
    there are so few samples that not even losing all of them would be significant.
    """
    fewest = math.ceil(1 - math.log2(LEVEL))  # all of them lost: p = 2 / 2^n
    if sum(counts) < fewest:
        return None

    def missing_power(loss: float) -> float:
        return float(_POWER - special.bdtrc(fewest - 1, int(sum(counts)), loss))

    exact = optimize.brentq(missing_power, 0.0, 1.0)
    spread, power = -special.ndtri(_TAIL), special.ndtri(_POWER)
    # Size of one task whose mean has the same variance.
    samples = len(counts) ** 2 / sum(1 / count for count in counts)

    def missing_loss(loss: float) -> float:
        discordant = min(1.0, 2 * gains + loss)
        needed = spread * math.sqrt(discordant) + power * math.sqrt(discordant - loss**2)
        return float(needed / math.sqrt(samples) - loss)

    if gains > 0 and missing_loss(1.0) < 0:
        return float(max(exact, optimize.brentq(missing_loss, 0.0, 1.0)))
    return float(exact)


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
    return Estimate.around(mean, half)


def crossed_mean(
    results: npt.ArrayLike,
    *,
    is_score: bool = False,
    counts: Sequence[int] | None = None,
    weights: Values | float = 1.0,
) -> Estimate:
    """Mean of `results` [S, E] (or [S]) over seeds and examples, both random.

    The half-width is the root of the sum of squares of both means' half-widths, each with its own
    t; that of examples' losses is wider, as in `student`. A score's interval is that of a share
    with this variance (Korn and Graubard 1998), of at most E samples. With one seed it is the
    interval of this seed's result; a single result has none. With `counts` the examples are those
    of consecutive subtasks with equal weights; `weights` are the examples' weights within their
    subtask, with a mean of 1. Raises ValueError if there are no results or one is not finite.
    """
    values = _weighted(_matrix(results), counts, weights)
    mean = float(values.mean())
    by_seed, by_example = _axis_variances(values)
    half = _half_width([by_seed, by_example if is_score else _widened_for_losses(by_example)])
    if half is None or not is_score:
        return Estimate.around(mean, half)
    count = _samples(values, counts, weights)
    if half > 0:
        count = min(count, mean * (1 - mean) * (special.ndtri(_TAIL) / half) ** 2)
    return Estimate(*share(mean, max(count, 1.0)))


def crossed_difference(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    is_score: bool = False,
    has_paired_seeds: bool = False,
) -> Estimate:
    """Mean of `first` minus mean of `second`, [S, E] each, on the same examples.

    The difficulty of examples cancels. The seeds of both sides are independent, since seed 3 of one
    method is unrelated to seed 3 of another, unless `has_paired_seeds`. Scores that agree on every
    example may differ on the next one, so the interval is at least as wide as the exact one of no
    event in E. Raises ValueError if the numbers of examples differ.
    """
    a, b = _matrix(first), _matrix(second)
    mean, (by_example, *by_seed) = _paired_parts(a, b)
    if has_paired_seeds:
        by_seed = _axis_variances(a - b)[:1]
    half = _half_width([by_example if is_score else _widened_for_losses(by_example), *by_seed])
    if half is None or not is_score:
        return Estimate.around(mean, half)
    return Estimate.around(mean, max(half, share(0.0, a.shape[1]).high)).within(-1.0, 1.0)


class CrossedTest(NamedTuple):
    """A difference of scores with the ends of its interval and its p-value."""

    mean: float
    low: float
    high: float
    p_value: float


def crossed_test(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    counts: Sequence[int] | None = None,
    weights: Values | float = 1.0,
    seed: int = 0,
) -> CrossedTest:
    """Mean score of `first` minus that of `second`, [S, E] each: `crossed_difference`, tested.

    The p-value is the level at which the interval would just exclude 0, and at least that of the
    randomisation test of the seeds' means, which is exact for few samples. If it is not
    significant, the interval contains 0. `counts` and `weights` are as in `crossed_mean`. Raises
    ValueError when the examples differ in number.
    """
    a, b = _matrix(first), _matrix(second)
    mean, parts = _paired_parts(_weighted(a, counts, weights), _weighted(b, counts, weights))
    samples = _samples(a, counts, weights)

    def half(tail: float) -> float:
        return max(_half_width(parts, tail) or 0.0, 1 - math.pow(tail, 1 / samples))

    def excess(log_tail: float) -> float:
        return half(math.exp(log_tail)) - abs(mean)

    lowest, highest = math.log(1e-15), math.log(0.5)
    p_value = 2 * math.exp(lowest)
    if excess(highest) >= 0:
        p_value = 1.0
    elif excess(lowest) > 0:
        p_value = 2 * math.exp(_root(excess, lowest, highest))
    by_example = (a.mean(axis=0) - b.mean(axis=0)) * _weights(a, counts, weights)
    p_value = max(p_value, _sign_flips([by_example], seed, is_bounded=True))
    low, high = max(-1.0, mean - half(_TAIL)), min(1.0, mean + half(_TAIL))
    if p_value >= LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    return CrossedTest(mean, low, high, p_value)


def holm(p_values: Sequence[float], among: int | None = None) -> list[float]:
    """P-values of several hypotheses, corrected for the family-wise error rate.

    Holm (1979): the k-th smallest of n is multiplied by n - k + 1, and made at least as large as
    the one before. `among` is n if these hypotheses were selected from more by their results.
    """
    n, previous, corrected = among or len(p_values), 0.0, [0.0] * len(p_values)
    for smaller, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        previous = max(previous, min(1.0, (n - smaller) * p_values[index]))
        corrected[index] = previous
    return corrected


def _weights(values: Values, counts: Sequence[int] | None, weights: Values | float) -> Values:
    """Weights [E] with which the mean over examples is the mean of the subtasks' means."""
    each = np.ones(values.shape[1]) * weights
    if counts is None:
        return each
    return np.repeat([sum(counts) / (len(counts) * count) for count in counts], counts) * each


def _weighted(values: Values, counts: Sequence[int] | None, weights: Values | float) -> Values:
    """Values [S, E] with the mean of the subtasks' means, and deviations scaled by their weights.

    So weights alone add no variance: a model that is always right has none.
    """
    weights = _weights(values, counts, weights)
    mean = np.clip((values * weights).mean(), values.min(), values.max())  # rounding
    return np.asarray(mean + (values - mean) * weights)


def _samples(values: Values, counts: Sequence[int] | None, weights: Values | float) -> float:
    """Number of examples that count as samples of one task, as in `mean_score`."""
    each = np.ones(values.shape[1]) * weights
    subtasks = np.split(each, np.cumsum(counts or [len(each)])[:-1])
    return float(len(subtasks) * min(part.sum() ** 2 / (part @ part) for part in subtasks))


def _paired_parts(a: Values, b: Values) -> tuple[float, list[tuple[float, int]]]:
    """Mean of a - b, and variances of its parts: examples, and the seeds of each side."""
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} examples: not the same set")
    by_example = (a.mean(axis=0) - b.mean(axis=0))[None]
    parts = [_axis_variances(by_example)[1], _axis_variances(a)[0], _axis_variances(b)[0]]
    return float(by_example.mean()), parts


def _is_pooled(counts: Sequence[float]) -> bool:
    return max(counts) <= 2 * min(counts) or min(counts) < _LARGE


def _mover(parts: Sequence[Interval], lowest: float) -> Interval:
    """The mean of independent estimates, whose distances to the limits add in squares (MOVER)."""
    mean = sum(part.mean for part in parts) / len(parts)
    below = math.sqrt(sum((part.mean - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.mean) ** 2 for part in parts)) / len(parts)
    return Interval(mean, max(lowest, mean - below), min(1.0, mean + above))


def _mean_difference(subtasks: Sequence[Values], counts: Sequence[float]) -> Interval:
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


def _ratio(difference: Interval, baseline: Interval, correlation: float) -> Interval | None:
    if baseline.low <= 0:
        return None
    ratio = (baseline.mean + difference.mean) / baseline.mean

    def limit(r: float, side: int) -> float:
        """Limit of first - r x second on one side: 0 at the end of the ratio's interval."""
        factor = 1 - r
        difference_end = difference.high if side > 0 else difference.low
        baseline_end = baseline.high if side * factor > 0 else baseline.low
        a = abs(difference_end - difference.mean)
        b = abs(factor) * abs(baseline_end - baseline.mean)
        # Where factor > 0 the correlation of the two would narrow the sum; it is left out.
        joint = -correlation if factor < 0 else 0.0
        half_width = math.sqrt(max(0.0, a**2 + b**2 + 2 * joint * a * b))
        return difference.mean + factor * baseline.mean + side * half_width

    if limit(_HIGHEST_RATIO, 1) > 0:
        return None
    low = 0.0 if limit(0.0, -1) <= 0 else _root(lambda r: limit(r, -1), 0.0, ratio)
    return Interval(ratio, low, _root(lambda r: limit(r, 1), ratio, _HIGHEST_RATIO))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.brentq(function, low, high))


def _correlation(differences: Sequence[Values], baseline: Sequence[Values]) -> float:
    """Correlation of a sample's difference with the second model's score, within subtasks."""
    x = np.concatenate([values - values.mean() for values in differences])
    y = np.concatenate([values - values.mean() for values in baseline])
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else 0.0


def _sign_flips(subtasks: Sequence[Values], seed: int, *, is_bounded: bool = False) -> float:
    """Two-sided p-value of the randomisation test, which flips whole differences.

    It is at least 1 / 4,001. With `is_bounded`, for many tests at once, it is Hoeffding's bound
    (1963) of the exact p-value if that is smaller and no flip reaches the sum.
    """
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
    p_value = (extreme + 1) / (_FLIPS + 1)
    if is_bounded and not extreme:
        p_value = min(p_value, 2 * math.exp(-(reached**2) / (2 * float(weighted @ weighted))))
    return p_value


def _matrix(results: npt.ArrayLike) -> Values:
    values = np.asarray(results, dtype=np.float64)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"expected results [S, E], got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("a result is not finite")
    return values


def _axis_variances(values: Values) -> list[tuple[float, int]]:
    """Variance of the mean over seeds and over examples, with their degrees of freedom."""
    means = values.mean(axis=1), values.mean(axis=0)
    return [(float(m.var(ddof=1)) / len(m) if len(m) > 1 else 0.0, len(m) - 1) for m in means]


def _half_width(parts: Sequence[tuple[float, int]], tail: float = _TAIL) -> float | None:
    """Half-width of a sum of means with these variances and degrees of freedom.

    None if none of them is known. Each has its own t, as in MOVER, since two seeds may agree by
    chance.
    """
    known = [_t(freedom, tail) ** 2 * variance for variance, freedom in parts if freedom > 0]
    return math.sqrt(sum(known)) if known else None


def _widened_for_losses(part: tuple[float, int]) -> tuple[float, int]:
    """Variance and degrees of freedom that make `_half_width` use the t of skewed values."""
    variance, freedom = part
    return (variance * (_skewed_t(freedom) / _t(freedom)) ** 2, freedom) if freedom else part


def _skewed_t(freedom: int) -> float:
    tail = next((tail for count, tail in _SKEWED if freedom + 1 < count), _TAIL)
    return float(special.stdtrit(freedom, 1 - tail))


def _t(freedom: float, tail: float = _TAIL) -> float:
    # For few values the tail is 0.4 times as large: 98 % instead of 95 %.
    tail = tail if freedom >= _FEW - 1 else 0.4 * tail
    return float(special.stdtrit(freedom, 1 - tail))
