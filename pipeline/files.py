"""Writing files so that a crash leaves the old or the new content, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no blanks, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically, on disk before the name is given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically, on disk before the name is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """The value of a JSON file; None where it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sync_folder(folder: Path) -> None:
    """Put a folder's names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put every file and folder below `folder` on disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(directory))


def files_below(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, relative to it, in order."""
    found = []
    for directory, _, names in os.walk(folder):
        base = os.path.relpath(directory, folder)
        found += [os.path.normpath(os.path.join(base, name)) for name in names]
    yield from sorted(found)


def make_symlink(link: Path, target: Path) -> None:
    """Point a relative symbolic link at a folder, replacing an older link in one step."""
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{os.urandom(8).hex()}.tmp")
    os.symlink(os.path.relpath(target, link.parent), temporary)
    os.replace(temporary, link)
