"""Paths as commands print them."""

from __future__ import annotations

from pathlib import Path


def typed_path(path: Path) -> str:
    """A path as it can be typed in the current directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
