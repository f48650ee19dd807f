"""Scales, ticks and number formats of the report."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.formats import (
    format_bytes,
    format_count,
    format_length,
    format_score,
    format_seconds,
    format_share,
)
from stages.report.charts import (
    Canvas,
    Scale,
    left_margin,
    nice_ticks,
    power_ticks,
    whole_ticks,
)
from stages.report.figures import extent, running_mean
from stages.report.search_figures import label_stride

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


@given(low=NUMBERS, span=st.floats(1e-3, 1e9), count=st.integers(2, 10))
def test_ticks_lie_inside_the_range_evenly(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = nice_ticks(low, high, count)
    assert 1 <= len(ticks) <= count + 1
    slack = 1e-6 * max(span, abs(low) * 1e-6, 1.0)
    assert low - slack <= ticks[0] <= ticks[-1] <= high + slack
    steps = [after - before for before, after in pairwise(ticks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3, abs_tol=1e-6) for step in steps)


def test_power_ticks_are_thinned_to_what_fits() -> None:
    assert power_ticks(32, 256, 2, 10) == [32, 64, 128, 256]
    thinned = power_ticks(32, 32768, 2, 5)
    assert len(thinned) <= 5
    assert thinned[0] == 32


def test_scales_map_their_ends_and_the_log_scale_ratios() -> None:
    linear = Scale(0, 10, 100, 0)
    assert (linear(0), linear(10), linear(5)) == (100, 0, 50)
    log = Scale(1, 100, 0, 10, log=True)
    assert log(10) == pytest.approx(5)


def test_text_and_tips_are_escaped() -> None:
    canvas = Canvas(10, 10)
    canvas.text(0, 0, "a<b")
    canvas.rect(0, 0, 1, 1, "cell", tip="<script>")
    svg = canvas.svg("n", "t & t", "d")
    assert "a&lt;b" in svg
    assert "<script>" not in svg
    assert "t &amp; t" in svg


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(0, 9))
def test_running_mean_stays_between_the_extremes(values: list[float], reach: int) -> None:
    means = running_mean(values, reach)
    assert len(means) == len(values)
    slack = 1e-6 * max(1.0, max(map(abs, values)))
    assert all(min(values) - slack <= mean <= max(values) + slack for mean in means)
    assert means[0] == values[0]


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_extent_is_never_flat(values: list[float]) -> None:
    low, high = extent(values)
    assert low < high
    assert low <= min(values) <= max(values) <= high


@pytest.mark.parametrize(("slot", "layers", "stride"), [(100, 6, 1), (19.5, 48, 1), (6, 48, 4)])
def test_layer_labels_do_not_overlap(slot: float, layers: int, stride: int) -> None:
    assert label_stride(slot, layers) == stride


def test_formats() -> None:
    assert format_score(None) == "–"
    assert format_score(96.04) == "96.0"
    assert format_share(0.875) == "87.5 %"
    assert format_share(0.75) == "75 %"
    assert [format_bytes(value) for value in (0, 512, 1536, 1024**2, 3.5 * 1024**3)] == [
        "0 B", "512 B", "1.5 KiB", "1 MiB", "3.5 GiB",
    ]  # fmt: skip
    assert [format_count(value) for value in (0, 950, 12_500, 1.3e6, 2.5e9, 100_000)] == [
        "0", "950", "12.5k", "1.3M", "2.5B", "100k",
    ]  # fmt: skip
    assert [format_length(value) for value in (600, 1024, 32768)] == ["600", "1k", "32k"]
    assert [format_seconds(value) for value in (0.42, 38.4, 185, 15_000)] == [
        "0.4 s", "38 s", "3 min 5 s", "4 h 10 min",
    ]  # fmt: skip


def test_axes_that_count_have_whole_ticks_and_wide_labels_get_room() -> None:
    assert whole_ticks(0.5, 3.5, 8) == [1, 2, 3]
    assert left_margin(["-50.18"]) > left_margin(["100 %"]) >= left_margin([])
