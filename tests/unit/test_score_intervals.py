"""The intervals of scores hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from bosch.analysis.intervals import compare, mean_interval, wilson

DRAWS = 1000


@pytest.mark.parametrize("count", [12, 50, 500])
@pytest.mark.parametrize("truth", [0.3, 0.9, 0.98])
def test_wilson_covers(truth: float, count: int) -> None:
    shares = np.random.default_rng(0).binomial(count, truth, DRAWS) / count
    held = [i.low <= truth <= i.high for i in (wilson(float(share), count) for share in shares)]
    assert np.mean(held) >= 0.92
    assert wilson(1.0, count).low < 1.0 == wilson(1.0, count).high


def test_wilson_of_known_counts() -> None:
    """8 of 10, as in Newcombe (1998)."""
    interval = wilson(0.8, 10)
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("truths", [[0.99, 0.6, 0.9], [1.0, 1.0, 0.95], [0.5] * 6])
@pytest.mark.parametrize("count", [12, 100])
def test_average_covers(truths: list[float], count: int) -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(DRAWS // 2):
        shares = [float(rng.binomial(count, truth)) / count for truth in truths]
        interval = mean_interval(shares, [count] * len(shares))
        held.append(interval.low <= np.mean(truths) <= interval.high)
    assert np.mean(held) >= 0.92


@pytest.mark.parametrize("truth", [(0.9, 0.8), (0.97, 0.97), (0.5, 0.6)])
@pytest.mark.parametrize("count", [30, 200])
def test_paired_intervals_cover(truth: tuple[float, float], count: int) -> None:
    """Correlated answers: what is hard for one model is hard for the other."""
    rng = np.random.default_rng(2)
    held, ratios, alarms = [], [], []
    for draw in range(250):
        hardness = rng.random((3, count))
        shuffled = np.where(rng.random((3, count)) < 0.2, rng.random((3, count)), hardness)
        first, second = hardness < truth[0], shuffled < truth[1]
        result = compare(first.astype(float), second.astype(float), seed=draw)
        held.append(result.difference.low <= truth[0] - truth[1] <= result.difference.high)
        assert result.ratio is not None
        ratios.append(result.ratio.low <= truth[0] / truth[1] <= result.ratio.high)
        alarms.append(result.p_value < 0.05)
    assert np.mean(held) >= 0.92 and np.mean(ratios) >= 0.92
    if truth[0] == truth[1]:
        assert np.mean(alarms) <= 0.075
    elif count == 200:
        assert np.mean(alarms) > 0.9


def test_models_that_agree_everywhere_are_not_said_to_be_equal() -> None:
    result = compare([[1.0] * 10], [[1.0] * 10])
    assert result.p_value == 1.0
    assert result.difference.low < 0 < result.difference.high
    assert compare([[1.0, 0.0]], [[0.0, 0.0]]).ratio is None
    with pytest.raises(ValueError, match="different samples"):
        compare([[1.0]], [[1.0, 0.0]])


def test_mean_of_one_subtask_is_the_subtask() -> None:
    assert mean_interval([0.5], [20]) == wilson(0.5, 20)
