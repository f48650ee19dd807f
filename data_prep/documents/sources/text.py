"""Text files, each a document."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bosch.errors import UserError
from data_prep.compressed import compressible, is_compressed
from data_prep.documents import sources
from data_prep.documents.sources import Kind, Part, Source, grouped
from data_prep.text import WINDOW, Document, TextFile, read_utf8

_TABLES = (*compressible(".csv", ".tsv", ".jsonl", ".ndjson"), ".parquet", ".arrow", ".mds")


class _Text(Kind):
    about = "a document in each file below `path`"

    def check_file(self, where: str, file: Path) -> None:
        if file.name.endswith(_TABLES):
            raise UserError(
                f"{where}: {file} holds records, not a text; set its kind, or name the texts by a "
                "glob"
            )

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        files = source.files
        for file in files:
            self.check_file(f"source {source.name}", file)
        return grouped(files, sources.PART_BYTES)

    def read(self, part: Part, source: Source) -> Iterable[Document]:
        # WINDOW counts characters, of which a file has at most as many as bytes.
        for path in part.paths:
            is_long = path.stat().st_size > WINDOW or is_compressed(path)
            yield TextFile(path) if is_long else read_utf8(path)


KIND = _Text()
