"""The text in which needles are hidden: a folder of the user, or pydoc's topics."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bosch.errors import UserError
from bosch.files import load_json
from data_prep.text import read_utf8

_SUFFIXES = (".txt", ".md", ".json")


def haystack_words(essay_dir: str | Path | None) -> list[str]:
    """The corpus as words, white space collapsed; files in the order of their names.

    A `.json` file holds an object with a `text` field, as RULER's own essay file does.

    Raises:
        UserError: the folder is missing, holds no text, or a file of it is damaged.
    """
    if essay_dir is None:
        words = " ".join(pydoc_topics().values()).split()
    else:
        words = " ".join(_read(path) for path in haystack_files(Path(essay_dir))).split()
    if not words:
        raise UserError(f"essay_dir {essay_dir}: the files hold no text; name a folder of prose")
    return words


def essay_identity(essay_dir: str | Path | None, words: Sequence[str]) -> dict[str, str | int]:
    """Which corpus was used, for statistics and reports: name, number of words, SHA-256."""
    version = ".".join(map(str, sys.version_info[:3]))
    name = f"pydoc topics of Python {version}" if essay_dir is None else str(essay_dir)
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    return {"name": name, "words": len(words), "sha256": digest}


def pydoc_topics() -> dict[str, str]:
    """Python's language help, by topic, sorted."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python comes without pydoc's topics (package pydoc_data): "
            "name a folder of prose as essay_dir"
        ) from None
    return dict(sorted(topics.items()))


def haystack_files(folder: Path, name: str = "essay_dir") -> list[Path]:
    """The folder's texts in the order of their names. Raises UserError where there is none."""
    if not folder.is_dir():
        raise UserError(f"{name} {folder}: no such folder; name a folder of .txt or .md files")
    files = sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    if not files:
        raise UserError(f"{name} {folder}: holds no {', '.join(_SUFFIXES)} file")
    return files


def _read(path: Path) -> str:
    if path.suffix != ".json":
        return read_utf8(path)
    try:
        field = load_json(path)["text"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: expected a JSON object with a field `text`") from None
    return str(field)
