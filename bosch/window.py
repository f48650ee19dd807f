"""The sliding window.

A sliding head with window W lets query t see keys j with t - W < j <= t: W keys, itself included
(BOSCH §2.1). With S sinks it also sees the first S tokens of its document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Kernels and vLLM count keys in 32 bits.
_MAX_KEYS = 2**31 - 1


@dataclass(frozen=True)
class Window:
    """Keys of a sliding head: the last `size`, the query's own included, and the first `sinks`.

    ValueError unless both are integers, `size` from 1, `sinks` from 0, their sum below 2^31.
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        size, sinks = self.size, self.sinks
        if type(size) is not int or size < 1 or type(sinks) is not int or sinks < 0:
            raise ValueError(
                "window_size must be an integer of at least 1 and sinks one of at least 0, found "
                f"{size!r:.60} and {sinks!r:.60}"
            )
        if size + sinks > _MAX_KEYS:
            raise ValueError(f"window_size and sinks are {self}; expected fewer than 2^31 in all")

    def __str__(self) -> str:
        return f"{self.size:,} with {self.sinks} sinks" if self.sinks else f"{self.size:,}"

    @property
    def past(self) -> int:
        """Past keys that the next query can see, without sinks: W - 1."""
        return self.size - 1

    def held(self, tokens: int) -> int:
        """Tokens that a sliding head caches after `tokens`: the last W - 1, and the sinks."""
        return min(tokens, self.past + self.sinks)

    @property
    def max_keys(self) -> int:
        """Most keys that a query sees; in longer texts a sliding head differs from a full one."""
        return self.size + self.sinks


def window_menu(windows: Window | Sequence[Window]) -> tuple[Window, ...]:
    """The windows, widest first; ValueError for none, equal sizes or different sinks."""
    menu = (windows,) if isinstance(windows, Window) else tuple(windows)
    sizes = sorted({window.size for window in menu}, reverse=True)
    if not menu or len(sizes) < len(menu) or len({window.sinks for window in menu}) > 1:
        raise ValueError(
            "the windows of sliding heads must differ in size and have the same sinks, found "
            f"{', '.join(str(window) for window in menu) or 'none'}"
        )
    return tuple(Window(size, menu[0].sinks) for size in sizes)


def named_share(least: int, original: int) -> str:
    """The share `least / original` as text, rounded up so that it allows `least`."""
    return f"{math.ceil(least / original * 1e6) / 1e6:g}"


def windows_text(windows: Sequence[Window]) -> str:
    """The sizes of a menu as text: `128`, or `128, 512 and 2,048 with 4 sinks`."""
    if not windows:
        return "none"
    menu = window_menu(windows)[::-1]
    *others, widest = (f"{window.size:,}" for window in menu)
    sizes = f"{', '.join(others)} and {widest}" if others else widest
    return f"{sizes} with {menu[0].sinks} sinks" if menu[0].sinks else sizes
