"""The window convention in other libraries' words; transformers' is tested with its own models."""

from __future__ import annotations

from typing import Any

import pytest

from bosch.window import Window


def test_window_counts_the_query_itself() -> None:
    window = Window(1024, 4)
    left, right = window.flash
    assert (left + 1, right) == (1024, 0)
    assert window.past + 1 == window.transformers == 1024
    assert window.most_keys == 1028
    assert (str(window), str(Window(512))) == ("1,024 with 4 sinks", "512")


@pytest.mark.parametrize(
    ("size", "sinks"), [(0, 0), (-3, 0), (2.5, 0), ("7", 0), (True, 0), (7, -1), (7, None)]
)
def test_impossible_windows_are_refused(size: Any, sinks: Any) -> None:
    with pytest.raises(ValueError, match="window_size must be an integer") as caught:
        Window(size, sinks)
    assert f"found {size!r} and {sinks!r}" in str(caught.value)
