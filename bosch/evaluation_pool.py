"""Evaluations that all searches of one store share, whatever their method, ratio or seed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from bosch.errors import RunError

logger = logging.getLogger(__name__)


class EvaluationPool:
    """An append-only file that several processes read and write at the same time.

    One file below `folder` for each `identity`, the text of all that the entries depend on. A line
    is written whole under a lock. What a killed writer left of a line is closed by the next one
    and never read as an entry.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        digest = hashlib.sha256(identity.encode()).hexdigest()
        self.path = folder / f"evaluations-{digest[:24]}.jsonl"
        self._offset = 0

    def append(self, line: dict[str, object]) -> None:
        """Add one entry; returns when it is on disk. Raises RunError where that fails."""
        text = (json.dumps(line) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
                file.write(b"\n" + text if torn else text)
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot write the shared evaluations ({error.strerror})"
            ) from error

    def read_new(self, use: Callable[[bytes], bool]) -> None:
        """Hand each whole line added since the last call to `use`, which says if it is one."""
        try:
            if self.path.stat().st_size <= self._offset:
                return
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot read the shared evaluations ({error.strerror})"
            ) from error
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        damaged = sum(not use(line) for line in content[:whole].splitlines())
        if damaged:
            logger.warning("%s: %d lines are damaged and not used", self.path, damaged)
