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
    visible_loss,
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


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.8), (0.8, 0.3), (0.6, 0.6)])
def test_a_ratio_has_fiellers_interval(first: float, second: float) -> None:
    """Fieller (1954) by MOVER; difference and baseline vary against each other."""
    rng = np.random.default_rng(2)
    hard = [rng.random(60) for _ in range(2)]
    scores = [[(h < p).astype(float) for h in hard] for p in (first, second)]
    scores[0] = [np.where(rng.random(60) < 0.05, 1.0, score) for score in scores[0]]
    result, base = compare(*scores), mean_score([score.mean() for score in scores[1]], [60, 60])
    centred = [
        np.concatenate([value - value.mean() for value in values])
        for values in ([a - b for a, b in zip(*scores, strict=True)], scores[1])
    ]
    correlation, difference = np.corrcoef(centred)[0, 1], result.difference
    assert result.ratio is not None and correlation < -0.05
    for side, at, end in (
        (-1, result.ratio.low, difference.low), (1, result.ratio.high, difference.high)
    ):  # fmt: skip
        factor = 1 - at
        own = end - difference.mean
        other = factor * ((base.high if side * factor > 0 else base.low) - base.mean)
        joint = -2 * correlation * abs(own * other) if factor < 0 else 0.0
        reach = side * np.sqrt(own**2 + other**2 + joint)
        assert difference.mean + factor * base.mean + reach == pytest.approx(0, abs=1e-9)


def test_a_ratio_with_a_baseline_near_zero_has_no_interval() -> None:
    bounded = compare([[1.0] * 200], [[1.0] + [0.0] * 199]).ratio
    assert bounded is not None and bounded.high == pytest.approx(7900, rel=0.01)
    assert compare([[1.0] * 200], [[0.9] + [0.0] * 199]).ratio is None


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
    assert result.ratio is not None and result.ratio.low <= 1 - exact
    assert compare([[1.0, 0.0]], [[0.0, 0.0]]).ratio is None
    with pytest.raises(ValueError, match="different samples"):
        compare([[1.0]], [[1.0, 0.0]])
    for scores in ([], [[]], [[1.0], []], [[float("nan")]]):
        with pytest.raises(ValueError, match=r"no samples, or scores that are not finite"):
            compare(scores, scores)


@pytest.mark.parametrize(
    ("counts", "gains"),
    [([12], 0.0), ([48], 0.0), ([200], 0.0), ([200], 0.1), ([100, 2000], 0.0), ([90, 600], 0.1)],
)
def test_the_detectable_loss_is_detected_in_four_cases_of_five(
    counts: list[int], gains: float
) -> None:
    """Also if a tenth of the samples is won, which hides some losses."""
    rng, seen, loss = np.random.default_rng(1), [], visible_loss(counts, gains)
    assert loss is not None
    for draw in range(150):
        drawn = [rng.random(count) for count in counts]
        first = [sample < gains for sample in drawn]
        second = [(sample >= gains) & (sample < 2 * gains + loss) for sample in drawn]
        seen.append(compare(first, second, draw).p_value < 0.05)
    assert np.mean(seen) == pytest.approx(0.8, abs=0.09)


def test_five_samples_detect_nothing() -> None:
    """Even if all of them are lost, p = 2 / 2^5 is above 5 %."""
    result = compare([[0.0] * 5], [[1.0] * 5])
    assert result.p_value > 0.05 and result.visible_loss is None
    assert result.difference.high == 0 and result.ratio.high == 1
    result = compare([[0.0] * 6], [[1.0] * 6])
    assert result.p_value < 0.05 and result.visible_loss == visible_loss([6])
    won = compare([[1.0] * 2 + [0.0] * 18, [1.0] * 40], [[0.0] * 2 + [1.0] * 18, [1.0] * 40])
    assert won.visible_loss == visible_loss([20, 40], gains=0.05)
    assert result.difference.high < 0


def test_a_comparison_is_exact_if_few_samples_differ() -> None:
    """Of five subtasks of one sample each by signs alone; otherwise by random flips."""
    assert compare([[1.0]] * 5, [[0.0]] * 5).p_value == pytest.approx(2 / 2**5, abs=0.01)
    ones = np.ones((2, 30))
    assert compare(ones, 0 * ones).p_value == 1 / 4001
