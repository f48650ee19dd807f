"""Paths as commands print them."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.load import ROOT


def typed_path(path: Path) -> str:
    """A path as it can be typed in the current directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def model_label(path: str) -> str:
    """A model in published pages: relative to the checkout, without the machine's folders."""
    folder = Path(path)
    if not folder.is_absolute():
        return path
    return str(folder.relative_to(ROOT)) if ROOT in folder.parents else folder.name
