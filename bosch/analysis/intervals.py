"""95 % intervals of scores in [0, 1], and comparisons of two models on the same samples.

A benchmark's score is the mean over its subtasks, each a task at a length, of the mean over the
subtask's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bosch.analysis.bootstrap import Interval

_Z = 1.959963984540054  # 97.5 % of the normal distribution lie below
_FLIPS = 4000
_CHUNK = 500


class Comparison(NamedTuple):
    """First model against second: difference of scores, first over second, and a p-value.

    `p_value` is that of the hypothesis that the two answer equally well.
    """

    difference: Interval
    ratio: Interval | None
    p_value: float


def wilson(mean: float, count: int) -> Interval:
    """Wilson's interval (1927) of a share; wider than needed where samples have partial scores."""
    shrunk = 1 + _Z**2 / count
    centre = (mean + _Z**2 / (2 * count)) / shrunk
    half = _Z / shrunk * math.sqrt(mean * (1 - mean) / count + (_Z / (2 * count)) ** 2)
    return Interval(mean, max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean)))


def mean_interval(means: Sequence[float], counts: Sequence[int]) -> Interval:
    """The unweighted mean of independent subtasks, by the MOVER (Zou and Donner 2008).

    Of a subtask's Wilson and normal limits the farther ones enter, since Wilson's own
    centre, to which its limits belong, is lost in the mean.
    """
    subtasks = [wilson(mean, count) for mean, count in zip(means, counts, strict=True)]
    if len(subtasks) == 1:
        return subtasks[0]
    below = above = 0.0
    for subtask, count in zip(subtasks, counts, strict=True):
        normal = _Z * math.sqrt(subtask.mean * (1 - subtask.mean) / count)
        below += max(subtask.mean - subtask.low, normal) ** 2
        above += max(subtask.high - subtask.mean, normal) ** 2
    mean = sum(means) / len(subtasks)
    low, high = mean - math.sqrt(below) / len(subtasks), mean + math.sqrt(above) / len(subtasks)
    return Interval(mean, max(0.0, low), min(1.0, high))


def compare(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], seed: int = 0
) -> Comparison:
    """Two models on the same samples, subtask by subtask.

    The intervals are normal, with one pseudo-sample of either sign (Agresti and Min 2005), so that
    models that agree everywhere are not said to be equal; the p-value flips the signs of the
    samples' differences. `ratio` is None where the second score is 0.
    """
    a = [np.asarray(subtask, dtype=np.float64) for subtask in first]
    b = [np.asarray(subtask, dtype=np.float64) for subtask in second]
    if [len(subtask) for subtask in a] != [len(subtask) for subtask in b]:
        raise ValueError("the models have different samples")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean = _mean(differences)
    spread = _Z * _error(differences)
    return Comparison(
        Interval(mean, max(-1.0, mean - spread), min(1.0, mean + spread)),
        _ratio(a, b),
        _sign_flips(differences, seed),
    )


def _mean(subtasks: Sequence[npt.NDArray[np.float64]]) -> float:
    return float(sum(subtask.mean() for subtask in subtasks) / len(subtasks))


def _error(subtasks: Sequence[npt.NDArray[np.float64]]) -> float:
    """Standard error of the mean over subtasks."""
    variance = sum(
        float(((subtask - subtask.mean()) ** 2).mean()) / len(subtask) for subtask in subtasks
    )
    total = sum(map(len, subtasks))
    return math.sqrt(variance / len(subtasks) ** 2 + 1 / total**2)


def _ratio(
    first: Sequence[npt.NDArray[np.float64]], second: Sequence[npt.NDArray[np.float64]]
) -> Interval | None:
    below = _mean(second)
    if below == 0:
        return None
    ratio = _mean(first) / below
    spread = _Z * _error([x - ratio * y for x, y in zip(first, second, strict=True)]) / below
    return Interval(ratio, max(0.0, ratio - spread), ratio + spread)


def _sign_flips(subtasks: Sequence[npt.NDArray[np.float64]], seed: int) -> float:
    """Two-sided p-value of the randomisation test, which flips whole differences."""
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
