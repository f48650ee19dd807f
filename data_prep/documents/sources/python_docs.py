"""The source of Python's standard library, and its language help."""

from __future__ import annotations

import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from bosch.errors import UserError
from data_prep.documents.sources import Kind, Part, Source, grouped
from data_prep.text import pydoc_topics

logger = logging.getLogger(__name__)

_PART_BYTES = 2**20
# Many installations lack the tests, and some of these files have odd encodings.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class _PythonDocs(Kind):
    about = "the standard library's source and pydoc's topics"
    needs_path = False

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        """The modules, sorted by name; all topics are one part."""
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(_modules(library))
        if not files:
            raise UserError(
                f"source {source.name}: the standard library's source is not in {library}"
            )
        return [*grouped(files, _PART_BYTES), Part(())]

    def read(self, part: Part, source: Source) -> Iterable[str]:
        if not part.paths:
            yield from pydoc_topics().values()
        for path in part.paths:
            try:
                with tokenize.open(path) as file:
                    yield file.read()
            except (SyntaxError, UnicodeDecodeError):
                logger.warning("source %s: left out %s, which is not text", source.name, path)


def _modules(library: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


KIND = _PythonDocs()
