"""The window convention in other libraries' words; transformers' is tested with its own models."""

from __future__ import annotations

import pytest

from bosch.windows import cached_keys, check_window, flash_window


def test_window_counts_the_query_itself() -> None:
    left, right = flash_window(1024)
    assert (left + 1, right) == (1024, 0)
    assert cached_keys(1024) + 1 == 1024


@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (-3, 0), (4, -1)])
def test_impossible_windows_are_refused(window: int, sinks: int) -> None:
    with pytest.raises(ValueError, match="window_size" if window < 1 else "sinks"):
        check_window(window, sinks)
