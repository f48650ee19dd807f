"""Parquet files; a part is a row group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import open_regular
from data_prep.documents.sources import Kind, Part, Source, records

# A file has a magic number, row groups, footer, footer length (4 bytes), magic number.
_MAGIC = b"PAR1"
_MIN_BYTES = 12


class _Parquet(Kind):
    about = "a document in each row of the files below `path`"
    suffixes = (".parquet",)
    has_fields = True

    def check_file(self, where: str, file: Path) -> None:
        size = file.stat().st_size
        with open_regular(file) as stream:
            start = stream.read(4)
            stream.seek(max(size - 8, 0))
            footer_length, end = stream.read(4), stream.read(4)
        if size < _MIN_BYTES or start != _MAGIC or end != _MAGIC:
            raise UserError(
                f"{file} is not a whole Parquet file (cut short or of another kind)", where
            )
        if int.from_bytes(footer_length, "little") > size - _MIN_BYTES:
            raise UserError(f"{file} is a damaged Parquet file (its footer does not fit)", where)

    def first_record(self, source: Source) -> Mapping[str, Any]:
        return next(records().parquet_rows(source.files[0], 0), {})

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        for file in source.files:
            for group in range(records().parquet_row_groups(file, source.text_field)):
                yield Part((file,), group)

    def read(self, part: Part, source: Source) -> Any:
        return records().read_parquet(part.paths[0], part.start, source.text_field, source.filters)


KIND = _Parquet()
