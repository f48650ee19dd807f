"""Finished parts of a command's work, so that a stopped command continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bosch.files import canonical_json
from bosch.journal import Journal

Record = dict[str, Any]


class FinishedWork:
    """Results by key in one journal; a key is a JSON object of all that the result depends on."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)
        self._results: dict[str, Record] = dict(self._journal.read_new(_result))

    def __len__(self) -> int:
        return len(self._results)

    def once(self, key: Mapping[str, Any], compute: Callable[[], Record]) -> Record:
        """The stored result of `key`, or that of `compute`, stored before it is returned."""
        name = canonical_json(key)
        if name not in self._results:
            result = compute()
            self._journal.append({"key": dict(key), "result": result})
            self._results[name] = result
        return self._results[name]

    def forget(self) -> None:
        """Remove the file: the command is complete, and its next run starts afresh."""
        self._journal.path.unlink(missing_ok=True)
        self._results.clear()


def _result(entry: Record) -> tuple[str, Record]:
    """The key and the result of an entry."""
    key, result = entry["key"], entry["result"]
    if not isinstance(key, dict) or not isinstance(result, dict):
        raise ValueError("key and result must be JSON objects")
    return canonical_json(key), result
