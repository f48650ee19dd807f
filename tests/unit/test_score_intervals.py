"""Intervals against their definitions, and cases with too few samples.

studies/coverage.py simulates how often they hold the true value.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bosch.analysis.intervals import (
    compare,
    mean_score,
    share,
    student,
)


def test_interval_of_a_share_equals_published_values() -> None:
    """8 of 10, as in Newcombe (1998), and none of 48."""
    assert share(0.8, 10) == pytest.approx((0.8, 0.4439, 0.9748), abs=1e-4)
    assert share(0.0, 48) == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 48)))
    assert mean_score([0.5], [20]) == share(0.5, 20)
    assert share(1.0, 48) == pytest.approx((1.0, 0.025 ** (1 / 48), 1.0))


@pytest.mark.parametrize("counts", [(99, 300), (100, 200), (100, 201), (500, 900)])
def test_large_subtasks_of_unequal_size_have_intervals_of_their_own(counts: tuple) -> None:
    one, other = share(0.5, counts[0]), share(0.8, counts[1])
    expected = share(0.65, 2 * counts[0])
    if counts == (100, 201):
        low = 0.65 - np.hypot(0.5 - one.low, 0.8 - other.low) / 2
        expected = (0.65, low, 0.65 + np.hypot(one.high - 0.5, other.high - 0.8) / 2)
    assert mean_score([0.5, 0.8], counts) == pytest.approx(expected)


def test_gains_and_losses_of_a_difference_are_not_independent() -> None:
    """MOVER for 10 gains and 5 losses in 50 samples, two cells of a multinomial."""
    result = compare([[1.0] * 10 + [0.0] * 40], [[0.0] * 10 + [1.0] * 5 + [0.0] * 35])
    up, down = share(0.2, 50), share(0.1, 50)
    p, q = 10.5 / 51.5, 5.5 / 51.5
    joint = 2 * np.sqrt(p * q / (1 - p) / (1 - q))
    for end, gain, loss in (
        (result.difference.low, 0.2 - up.low, down.high - 0.1),
        (result.difference.high, up.high - 0.2, 0.1 - down.low),
    ):
        reach = np.sqrt(gain**2 + loss**2 + joint * gain * loss)
        assert abs(end - 0.1) == pytest.approx(reach)


def test_four_documents_have_no_interval() -> None:
    """Of two kinds that are as frequent, four are of one in an eighth of the cases."""
    assert student([2.5]) == (2.5, None, None)
    assert student([2.0, 3.0, 2.0, 3.0]) == (2.5, None, None)
    assert student([2.0, 3.0, 4.0, 3.0, 3.0]).low is not None


def test_few_values_get_a_higher_confidence_level() -> None:
    levels = {5: 99.5, 29: 99.5, 30: 99, 59: 99, 60: 98, 199: 98, 200: 95}
    for count, level in levels.items():
        values = np.arange(float(count))
        expected = stats.t.interval(level / 100, count - 1, values.mean(), stats.sem(values))
        assert student(values)[1:] == pytest.approx(expected)


def test_models_with_equal_answers_still_have_an_interval() -> None:
    """The exact bound for no event in 4 x 12 samples: 7.4 points."""
    result = compare([[1.0] * 12] * 4, [[1.0] * 12] * 4)
    exact = 1 - 0.025 ** (1 / 48)
    assert result.p_value == 1.0
    assert result.difference == pytest.approx((0.0, -exact, exact), abs=2e-3)
    with pytest.raises(ValueError, match="different samples"):
        compare([[1.0]], [[1.0, 0.0]])
    for scores in ([], [[]], [[1.0], []], [[float("nan")]]):
        with pytest.raises(ValueError, match=r"no samples, or scores that are not finite"):
            compare(scores, scores)


def test_five_samples_detect_nothing() -> None:
    """Even if all of them are lost, p = 2 / 2^5 is above 5 %."""
    result = compare([[0.0] * 5], [[1.0] * 5])
    assert result.p_value > 0.05 and result.difference.high == 0
    result = compare([[0.0] * 6], [[1.0] * 6])
    assert result.p_value < 0.05 and result.difference.high < 0


def test_a_comparison_is_exact_if_few_samples_differ() -> None:
    """Of five subtasks of one sample each by signs alone; otherwise by random flips."""
    assert compare([[1.0]] * 5, [[0.0]] * 5).p_value == pytest.approx(2 / 2**5, abs=0.01)
    ones = np.ones((2, 30))
    assert compare(ones, 0 * ones).p_value == 1 / 4001
