"""Documents from this machine's Python, and endless synthetic documents for retrieval."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bosch.errors import UserError
from data_prep.documents.retrieval import retrieval_documents
from data_prep.documents.sources import Kind, Source
from data_prep.text import haystack_words, pydoc_topics

# Characters of a retrieval document, for which there are enough different keys.
_LONGEST = 2**20
# Many installations lack the tests.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def _modules(source: Source) -> list[Path | None]:
    """The modules and, as None, all topics."""
    library = sysconfig.get_paths()["stdlib"]
    files: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    if not files:
        raise UserError(f"source {source.name}: the standard library's source is not in {library}")
    return [*sorted(files), None]


def _python(path: Path | None, source: Source) -> Iterator[tuple[str, str]]:
    if path is None:
        yield from pydoc_topics().items()
    else:
        yield str(path), path.read_text(encoding="utf-8", errors="ignore")


def _retrieval(_: None, source: Source) -> Iterator[tuple[str, str]]:
    characters = 500, min(max(4000, 2 * source.sequence_length), _LONGEST)
    for text in retrieval_documents(source.seed, haystack_words(None), characters):
        yield source.name, text


KINDS = {
    "python_docs": Kind(
        "the standard library's source and pydoc's topics", _python, _modules, needs_path=False
    ),
    "retrieval": Kind(
        "synthetic key-value and needle documents", _retrieval, lambda source: [None],
        needs_path=False,
    ),
}  # fmt: skip
