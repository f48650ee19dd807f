"""Content hashes of files, cached by path, size, time and inode."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from bosch.files import file_digest, write_text

logger = logging.getLogger(__name__)

# A file that was just written could change again within one tick of its clock.
SETTLED_NS = 50_000_000
_LARGE = 1024**3


class NotHashed(Exception):
    """The hash of a file is not known, and computing it would exceed the budget."""


class FileHasher:
    """SHA-256 of files, cached between runs; beyond `budget_bytes` `sha256` raises NotHashed."""

    def __init__(self, cache: Path, budget_bytes: int | None = None) -> None:
        self._cache = cache
        self._budget = budget_bytes
        self._known: dict[str, list[Any]] = _read_cache(cache)
        self._new: dict[str, list[Any]] = {}

    def sha256(self, path: Path) -> str:
        """Content hash of a file; raises OSError, or NotHashed when over budget."""
        stat = os.stat(path)
        state = _file_state(stat)
        entry = self._known.get(str(path))
        if entry is not None and entry[:-1] == state:
            return str(entry[-1])
        if self._budget is not None:
            self._budget -= stat.st_size
            if self._budget < 0:
                raise NotHashed(str(path))
        if stat.st_size > _LARGE:
            logger.info("hashing %s (%.1f GB)", path, stat.st_size / 1e9)
        digest = file_digest(path)
        after = os.stat(path)
        if _file_state(after) == state and time.time_ns() - after.st_mtime_ns > SETTLED_NS:
            self._remember(str(path), [*state, digest])
        return digest

    def record(self, path: Path, digest: str) -> None:
        """Store a file's hash, which was computed while the file had another name."""
        self._remember(str(path), [*_file_state(os.stat(path)), digest])

    def _remember(self, path: str, entry: list[Any]) -> None:
        self._known[path] = self._new[path] = entry

    def save(self) -> None:
        """Add new hashes to the cache file, if it can be written; drop those of deleted files."""
        if not self._new:
            return
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._cache.with_suffix(".lock")):
                merged = {**_read_cache(self._cache), **self._new}
                known = {path: entry for path, entry in merged.items() if os.path.exists(path)}
                write_text(self._cache, json.dumps(known))
        except IsADirectoryError:  # report it, with its path
            raise
        except OSError as error:
            message = "hashes of input files cannot be stored, so they are computed again: %s"
            logger.info(message, error)
        self._new = {}


def _read_cache(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_bytes())  # of any size: 300,000 files take 64 MiB
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: e for key, e in content.items() if isinstance(e, list) and len(e) == 4}


def _file_state(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
