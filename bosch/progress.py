"""Progress of long work: a bar on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts and shows finished items of `total`; `update` is cheap enough for inner loops."""

    def __init__(self, total: int | None, description: str, unit: str) -> None:
        self.total, self.description, self.unit = total, description, unit
        self.done = self._free = 0
        self._started = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=description, unit=unit, leave=False)
            if sys.stderr.isatty()
            else None
        )

    def update(self, items: int = 1, note: str = "", *, free: bool = False) -> None:
        """Count `items` as done and show `note`; `free` ones do not count in the time left."""
        self.done += items
        self._free += items if free else 0
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(items)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._log(note)

    def _log(self, note: str) -> None:
        seconds = time.monotonic() - self._started
        total = f"/{self.total:,}" if self.total is not None else ""
        left = ""
        worked = self.done - self._free
        if self.total and worked:
            left = f", {seconds * max(0, self.total - self.done) / worked:.0f} s left"
        tail = f", {note}" if note else ""
        logger.info(
            "%s: %s%s %s, %.0f s%s%s",
            self.description, f"{self.done:,}", total, self.unit, seconds, left, tail,
        )  # fmt: skip

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress(total: int | None, description: str, unit: str = "items") -> Iterator[Progress]:
    """Show progress of a block of work: `with progress(100, "search") as bar: bar.update()`."""
    bar = Progress(total, description, unit)
    try:
        yield bar
    finally:
        bar.close()
