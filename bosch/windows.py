"""The one window convention, and what other libraries call the same thing.

A sliding head with window W lets query t see keys j with t - W < j <= t: W keys, itself included
(BOSCH §2.1). With `sinks` = S it also sees the first S tokens of its document. A window is never
converted anywhere else.
"""

from __future__ import annotations


def check_window(window_size: int, sinks: int) -> None:
    """Raise ValueError unless both are integers, `window_size` >= 1 and `sinks` >= 0."""
    if type(window_size) is not int or window_size < 1 or type(sinks) is not int or sinks < 0:
        raise ValueError(
            "window_size must be an integer of at least 1 and sinks one of at least 0, found "
            f"{window_size!r} and {sinks!r}"
        )


def flash_window(window_size: int) -> tuple[int, int]:
    """flash-attn's `window_size=(left, right)`: keys seen besides the query's own position."""
    return window_size - 1, 0


def transformers_sliding_window(window_size: int) -> int:
    """transformers' `sliding_window`: it counts the query's own position too."""
    return window_size


def cached_keys(window_size: int) -> int:
    """Past keys the next query of a sliding head can still see: what a cache must keep."""
    return window_size - 1
