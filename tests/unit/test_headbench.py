"""HeadBench and what studies measure: windows, and intervals of scores and of likelihoods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bosch.analysis.intervals import crossed_difference, crossed_mean
from bosch.window import MOST_WINDOWS, Window
from pipeline.commands.study.headbench import _menu
from pipeline.commands.study.runs import Measured
from stages.search.stage import SearchConfig


@pytest.mark.parametrize(
    ("window", "sinks", "lengths", "sizes"),
    [
        (32, 0, (100, 100), [8, 16, 32, 64]),
        (32, 0, (100, 64), [8, 16, 32]),  # a window of all that the shortest set has is none
        (32, 0, (64, 100), [8, 16, 32]),
        (32, 0, (65, 100), [8, 16, 32, 64]),
        (32, 4, (68, 100), [8, 16, 32]),
        (3, 0, (5, 5), [1, 2, 4]),
        (1, 0, (10**9, 10**9), [2**power for power in range(MOST_WINDOWS)]),
    ],
)
def test_windows_are_doubled_as_long_as_they_hide_something(
    window: int, sinks: int, lengths: tuple[int, int], sizes: list[int]
) -> None:
    """In all sets: that of held-out examples and each seed's own."""
    search = SearchConfig(swa_ratio=0.5, window_size=window, sinks=sinks)
    held_out, own = (SimpleNamespace(max_length=length) for length in lengths)
    roomy = SimpleNamespace(max_length=10**9)
    model: Any = SimpleNamespace(
        recipe={SearchConfig: search}, options=SimpleNamespace(seeds=2), held_out_set=held_out,
        calibration=[roomy, own].__getitem__,
    )  # fmt: skip
    assert _menu(model) == tuple(Window(size, sinks) for size in reversed(sizes))


def test_scores_have_the_intervals_of_shares_and_likelihoods_those_of_losses() -> None:
    rng = np.random.default_rng(0)
    scores, nats = np.ones((3, 20)), -rng.exponential(size=(3, 20))
    runs: Any = [SimpleNamespace(costs={"passes": cost}) for cost in (3.0, 1.0, 8.0)]
    setting: Any = SimpleNamespace()
    own = Measured(setting, runs, {"score": scores, "log_likelihood": nats})
    other = Measured(setting, runs, {"score": scores[:2], "log_likelihood": 2 * nats})
    for measure, values, less, is_score in (
        ("score", scores, scores[:2], True), ("log_likelihood", nats, 2 * nats, False),
    ):  # fmt: skip
        assert own.mean(measure) == crossed_mean(values, is_score=is_score)
        difference = crossed_difference(values, less, is_score=is_score)
        assert own.difference(measure, other) == difference
        assert own.mean(measure) != crossed_mean(values, is_score=not is_score)
        assert difference != crossed_difference(values, less, is_score=not is_score)
    assert own.cost("passes") == 3.0
