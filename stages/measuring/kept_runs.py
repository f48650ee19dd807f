"""Runs of a measurement under way, kept on disk so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = dict[str, Any]


class KeptRuns:
    """What each request gave, one line of JSON each; a line that is cut short does not count."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Run] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                asked, run = json.loads(line)
            except ValueError:
                continue
            self._found[_key(asked)] = run

    def __len__(self) -> int:
        return len(self._found)

    def run(self, request: dict[str, Any], measure: Callable[[dict[str, Any]], Run]) -> Run:
        """The run kept for `request`, else the one that `measure` makes."""
        key = _key(request)
        if key not in self._found:
            self._found[key] = measure(request)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([request, self._found[key]]) + "\n")
        return self._found[key]

    def forget(self) -> None:
        """The measurement is complete: the next one begins anew."""
        self._file.unlink(missing_ok=True)


def _key(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)
