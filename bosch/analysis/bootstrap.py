"""Confidence intervals by the bootstrap (Efron 1979), for results over seeds and examples.

The paper gives no error bars. S seeds, E examples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_DRAWS = 10_000
_CHUNK = 500


class Interval(NamedTuple):
    """Estimate and the ends of its percentile interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    results: npt.ArrayLike, confidence: float = 0.95, draws: int = _DRAWS, seed: int = 0
) -> Interval:
    """Mean of `results` [S, E] (or [S]) with seeds and examples drawn anew, each with repetition.

    Raises ValueError when there is no result or one is not finite.
    """
    values = _matrix(results)
    rng = np.random.default_rng(seed)
    means = [
        _weighted(
            values, _weights(rng, count, values.shape[0]), _weights(rng, count, values.shape[1])
        )
        for count in _chunks(draws)
    ]
    return _interval(float(values.mean()), np.concatenate(means), confidence)


def paired_difference(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    confidence: float = 0.95,
    draws: int = _DRAWS,
    seed: int = 0,
) -> Interval:
    """Mean of `first` minus mean of `second`, both [S, E] on the same examples.

    In every draw both sides get the same examples, so that what is hard for both cancels. Seeds
    are drawn for each side on its own: seed 3 of one method has nothing to do with seed 3 of
    another. Raises ValueError when the examples differ in number.
    """
    a, b = _matrix(first), _matrix(second)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} examples: not the same set")
    rng = np.random.default_rng(seed)
    differences = []
    for count in _chunks(draws):
        examples = _weights(rng, count, a.shape[1])
        mine = _weighted(a, _weights(rng, count, a.shape[0]), examples)
        theirs = _weighted(b, _weights(rng, count, b.shape[0]), examples)
        differences.append(mine - theirs)
    return _interval(float(a.mean() - b.mean()), np.concatenate(differences), confidence)


def _matrix(results: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(results, dtype=np.float64)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"expected results [S, E], got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("a result is not finite")
    return values


def _weights(rng: np.random.Generator, draws: int, size: int) -> npt.NDArray[np.float64]:
    """Share of each of `size` things in draws with repetition, [draws, size]."""
    counts: npt.NDArray[np.float64] = rng.multinomial(size, np.full(size, 1.0 / size), draws) / size
    return counts


def _weighted(
    values: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.float64],
    examples: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    means: npt.NDArray[np.float64] = ((seeds @ values) * examples).sum(axis=1)
    return means


def _chunks(draws: int) -> list[int]:
    return [min(_CHUNK, draws - start) for start in range(0, draws, _CHUNK)]


def _interval(mean: float, draws: npt.NDArray[np.float64], confidence: float) -> Interval:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    return Interval(mean, float(low), float(high))
