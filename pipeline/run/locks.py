"""A lock for each stage output, which the system frees when its holder dies."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bosch.errors import RunError

# `holder` takes a free lock for a moment.
MOMENT_SECONDS = 2.0


@contextlib.contextmanager
def hold(path: Path, name: str, recipe: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` of the output `name` during the block.

    Raises RunError, which names the holder, if another process has it; with `wait` it waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(path), path.with_suffix(".holder")
    try:
        try:
            lock.acquire(timeout=MOMENT_SECONDS)
        except Timeout:
            message = f"{name} is being made by {_holder(path)}"
            if not wait:
                raise RunError(f"{message}; wait for it, or pass --wait") from None
            print(f"waiting: {message}", flush=True)
            lock.acquire()
    except OSError as error:
        raise RunError(
            f"{path}: cannot be locked ({error.strerror}); put runtime.output_root on a file "
            "system with locks"
        ) from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        place = f"pid {os.getpid()} on {socket.gethostname()}"
        note.write_text(f"{place} (recipe {recipe}, since {since})", encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def holder(path: Path) -> str | None:
    """Who holds the lock; None if it is free."""
    if not path.exists():
        return None
    try:
        with FileLock(path, blocking=False):
            return None
    except Timeout:
        return _holder(path)
    except OSError:  # this user may not lock it
        return None


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.with_suffix(".holder").read_text(encoding="utf-8") or "another process"
    return "another process"
