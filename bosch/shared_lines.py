"""A file of JSON lines that several processes read and append to at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import RunError

logger = logging.getLogger(__name__)


class SharedLines:
    """An append-only file below `folder`, one for each `identity`.

    `identity` is the text of all that the entries depend on. Lines are written whole, under a
    lock, each with a checksum. What a killed writer left of a line is closed by the next one and,
    like a line that was damaged on disk, never read as an entry.
    """

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        digest = hashlib.sha256(identity.encode()).hexdigest()
        self.path = folder / f"{name}-{digest[:24]}.jsonl"
        self._offset = 0

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Add entries; returns when they are on disk. Raises RunError where that fails."""
        if not entries:
            return
        text = b"".join(_line(entry) for entry in entries)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
                file.write(b"\n" + text if torn else text)
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error

    def read_new(self, use: Callable[[dict[str, Any]], None]) -> None:
        """Hand each entry added since the last call to `use`. Raises RunError for a failed read."""
        try:
            if self.path.stat().st_size <= self._offset:
                return
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror})") from error
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        damaged = 0
        for line in content[:whole].splitlines():
            entry = _entry(line)
            if entry is None:
                damaged += 1
            else:
                use(entry)
        if damaged:
            logger.warning("%s: damaged lines, not used: %d", self.path, damaged)


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry)
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _entry(line: bytes) -> dict[str, Any] | None:
    check, _, text = line.partition(b" ")
    if check != f"{zlib.crc32(text):08x}".encode():
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
