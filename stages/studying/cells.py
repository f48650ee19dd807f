"""Finished cells of a study, so that one that was stopped goes on: append-only JSONL."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import RunError

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Cells:
    """Results by key; a key is all that the result depends on, as a JSON object.

    A last line that a killed process left torn is cut off, a damaged line elsewhere is not used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._known)

    def once(self, key: Mapping[str, Any], compute: Callable[[], Record]) -> Record:
        """The remembered result of `key`, else that of `compute`, on disk before it is returned."""
        name = _name(key)
        if name not in self._known:
            result = compute()
            self._append({"key": dict(key), "result": result})
            self._known[name] = result
        return self._known[name]

    def _append(self, line: Record) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot write results ({error.strerror})") from error

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: cut off a torn last line of a stopped study", self.path)
            os.truncate(self.path, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._known[_name(record["key"])] = dict(record["result"])
            except (ValueError, KeyError, TypeError):
                logger.warning("%s: line %d is damaged and not used", self.path, number)


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))
