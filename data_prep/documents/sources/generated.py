"""Documents from this machine's Python, and endless synthetic documents for retrieval."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from bosch.errors import UserError
from data_prep.documents.retrieval import retrieval_documents
from data_prep.documents.sources import Kind, Part, Source
from data_prep.documents.sources.files import grouped
from data_prep.text import haystack_words, pydoc_topics

logger = logging.getLogger(__name__)

_PART_BYTES = 2**20
_DOCUMENTS = 256  # of retrieval in a part
# Many installations lack the tests, and some of these files have odd encodings.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def _modules(source: Source) -> Iterable[Part]:
    """The modules, sorted by name; all topics are one part."""
    library = sysconfig.get_paths()["stdlib"]
    files: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    if not files:
        raise UserError(f"source {source.name}: the standard library's source is not in {library}")
    return [*grouped(sorted(files), _PART_BYTES), Part()]


def _python(part: Part, source: Source) -> Iterator[str]:
    if not part.paths:
        yield from pydoc_topics().values()
    for path in part.paths:
        try:
            with tokenize.open(path) as file:
                yield file.read()
        except (SyntaxError, UnicodeDecodeError):
            logger.warning("source %s: left out %s, which is not text", source.name, path)


def _retrieval(part: Part, source: Source) -> Iterable[str]:
    seed, number, sequence_length = part.piece
    numpy = importlib.import_module("numpy")
    high, low = numpy.random.SeedSequence([seed, number]).generate_state(2, numpy.uint32).tolist()
    characters = 500, max(4000, 2 * sequence_length)
    documents = retrieval_documents(high << 32 | low, haystack_words(None), characters)
    return itertools.islice(documents, _DOCUMENTS)


KINDS = {
    "python_docs": Kind(
        "the standard library's source and pydoc's topics", _python, _modules, needs_path=False
    ),
    "retrieval": Kind("synthetic key-value and needle documents", _retrieval, needs_path=False),
}
