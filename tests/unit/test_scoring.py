from __future__ import annotations

import math

import pytest

from data_prep.scoring import mean_and_error, string_match


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (": 1234567.", ["1234567"], 1.0),
        ("1234568", ["1234567"], 0.0),
        ("ABC-Def\x00\x07", ["abc-dEF"], 1.0),
        ("one two", ["one", "two", "three", "four"], 0.5),
        ("123\x004567", ["1234567"], 0.0),
    ],
)
def test_string_match(output, answers, score):
    assert string_match(output, answers) == score


def test_mean_and_error():
    assert mean_and_error([1.0]) == (100.0, 0.0)
    mean, error = mean_and_error([1.0, 1.0, 0.0, 1.0])
    assert mean == 75.0
    assert error == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 3))
