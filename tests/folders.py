"""Files that tests write, and contents of folders that they compare."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, records: Iterable[Any]) -> None:
    """Write one JSON record per line; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def file_contents(folder: Path) -> dict[str, bytes]:
    """Bytes of every file below `folder`, by path relative to it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
