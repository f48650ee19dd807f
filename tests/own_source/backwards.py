"""A kind of source of one file: lines of files, the last first."""

from __future__ import annotations

from collections.abc import Iterable

from data_prep.documents.sources import Kind, Part, Source
from data_prep.text import read_utf8


class _Backwards(Kind):
    about = "lines below `path`, the last first"
    suffixes = (".lines",)

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return [Part((file,)) for file in source.files]

    def read(self, part: Part, source: Source) -> Iterable[str]:
        return reversed(read_utf8(part.paths[0]).splitlines())


KIND = _Backwards()
