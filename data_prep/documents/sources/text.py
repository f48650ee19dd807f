"""Text files, each a document."""

from __future__ import annotations

from collections.abc import Iterable

from data_prep.documents import sources
from data_prep.documents.sources import Kind, Part, Source, grouped
from data_prep.text import WINDOW, Document, TextFile, read_utf8


class _Text(Kind):
    about = "a document in each file below `path`"

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return grouped(source.files, sources.PART_BYTES)

    def read(self, part: Part, source: Source) -> Iterable[Document | None]:
        # WINDOW counts characters, of which a file has at most as many as bytes.
        for path in part.paths:
            yield TextFile(path) if path.stat().st_size > WINDOW else read_utf8(path)


KIND = _Text()
