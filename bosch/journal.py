"""Append-only files of JSON lines that survive a killed writer and a damaged disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from bosch.errors import RunError
from bosch.files import make_folder, sync, write_text

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
T = TypeVar("T")

# The last field of every line: the CRC-32 of the text before it.
_CHECKSUM = b'"crc32": "'


class Journal:
    """A file of JSON objects, one per line, that several processes append to and read.

    Lines are written under a lock and are on disk before `append` returns. A line ends with a field
    `crc32`, which entries do not have. The next `append` removes a killed writer's torn last line.
    Other lines with a wrong checksum or unknown fields are skipped and counted in `damaged`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Write entries to disk; RunError if that fails, ValueError for a number not finite."""
        if not entries:
            return
        lines = b"".join(map(_line, entries))
        try:
            make_folder(self.path.parent)
            is_new = not self.path.exists()
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                _cut_torn_line(file)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self.path.parent)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error

    def read_new(self, make: Callable[[Entry], T]) -> list[T]:
        """`make(entry)` for each entry that any process has appended since the last call.

        Damaged lines are skipped with one warning, and so are entries for which `make` raises
        KeyError, TypeError or ValueError. Raises RunError if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror})") from error
        # What follows the last line feed is torn or still being written.
        lines = content[: content.rfind(b"\n") + 1]
        self._offset += len(lines)
        entries, damaged = [], 0
        for line in lines.split(b"\n")[:-1]:
            entry, is_whole = _entry(line)
            if entry is not None:
                try:
                    entries.append(make(entry))
                except (KeyError, TypeError, ValueError):
                    is_whole = False
            damaged += not is_whole
        if damaged:
            self.damaged += damaged
            logger.warning("%s: %d damaged lines are not used", self.path, damaged)
        return entries

    def replace(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines by `entries`, atomically; no other process may append meanwhile."""
        try:
            write_text(self.path, b"".join(map(_line, entries)).decode())
            self._offset = self.path.stat().st_size
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error


def _cut_torn_line(file: BinaryIO) -> None:
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 2**16)
        file.seek(start)
        line_feed = file.read(end - start).rfind(b"\n")
        if line_feed >= 0:
            end = start + line_feed + 1
            break
        end = start
    if end < size:
        logger.warning("%s: cut off a torn last line", file.name)
        file.truncate(end)


def _line(entry: Mapping[str, Any]) -> bytes:
    fields = json.dumps(entry, allow_nan=False).encode()[:-1]
    head = fields + (b", " if entry else b"") + _CHECKSUM
    return head + f'{zlib.crc32(head):08x}"}}\n'.encode()


def _entry(line: bytes) -> tuple[Entry | None, bool]:
    """The entry of a line, and whether it is the whole line.

    After a damaged line feed, a line ends with the next one, which is still intact.
    """
    start = 0
    while start >= 0:
        text = line[start:]
        head, mark, _ = text.rpartition(_CHECKSUM)
        head += mark
        if text[len(head) :] == f'{zlib.crc32(head):08x}"}}'.encode():
            try:
                entry: Entry = json.loads(text)
            except (ValueError, RecursionError):
                return None, False
            del entry["crc32"]
            return entry, start == 0
        start = line.find(b'{"', start + 1)
    return None, False
