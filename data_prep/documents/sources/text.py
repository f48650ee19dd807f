"""Text files, each a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from bosch.errors import UserError
from data_prep.documents import sources
from data_prep.documents.sources import Kind, Part, Source, grouped
from data_prep.source_files import compressible
from data_prep.text import read_utf8

_TABLES = (*compressible(".csv", ".tsv", ".jsonl", ".ndjson"), ".parquet", ".arrow", ".mds")


class _Text(Kind):
    about = "a document in each file below `path`"

    def files(self, where: str, path: str) -> list[Path]:
        files = super().files(where, path)
        table = next((file for file in files if file.name.endswith(_TABLES)), None)
        if table is not None:
            raise UserError(
                f"{table} holds records, not a text; set its kind, or name the texts by a glob",
                where,
            )
        return files

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return grouped(source.files, sources.PART_BYTES)

    def read(self, part: Part, source: Source) -> Iterator[str]:
        yield from map(read_utf8, part.paths)


KIND = _Text()
