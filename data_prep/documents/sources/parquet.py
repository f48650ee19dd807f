"""Parquet files; a part is a row group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from data_prep.documents.sources import Part, Records, Source

_ROWS = 16  # that are held at once


class _Parquet(Records):
    about = "a document in each row of the files below `path`"
    suffixes = (".parquet",)

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
        for file in source.files:
            try:
                groups = _open(file).num_row_groups
            except (OSError, ValueError) as error:
                raise UserError(f"{file}: not a whole Parquet file ({error})") from None
            yield from (Part((file,), group) for group in range(groups))

    def records(self, part: Part, source: Source) -> Iterator[tuple[int, Any]]:
        file, row = _open(part.paths[0]), 0
        needed, names = {source.text_field, *source.filters.matches}, file.schema_arrow.names
        has_text = source.text_field in names  # otherwise a message lists all columns
        columns = [name for name in names if name in needed or not has_text]
        for batch in file.iter_batches(_ROWS, row_groups=[part.start], columns=columns):
            for record in batch.to_pylist():
                yield row, record
                row += 1

    def place(self, part: Part, source: Source, number: int) -> str:
        return f"{part.paths[0]}, row group {part.start}, row {number}"


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path)


KIND = _Parquet()
