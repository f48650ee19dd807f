"""Texts from records: JSONL (plain, gzip, zstd) and Parquet, with errors that say which record."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from data_prep.text import decode_utf8


def is_compressed(path: Path) -> bool:
    """Whether a JSONL file is read as gzip or zstd, from its name."""
    return path.suffix in (".gz", ".zst")


def read_jsonl(path: Path, start: int, stop: int, field: str) -> Iterator[str]:
    """Text of the records whose lines begin in bytes `start` to `stop`; of all if compressed.

    Raises:
        UserError: a record is cut short, no JSON, not UTF-8, or has no text in `field`.
    """
    try:
        with _open_binary(path) as file:
            at = start
            if at:
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < stop or is_compressed(path):
                line = file.readline()
                if not line:
                    break
                if line.strip():
                    yield _record_text(line, at, path, field)
                at += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); fetch it again") from None


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a zstd file; unlike the library's reader it notices a missing end."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._path, self._file = path, path.open("rb")
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._out = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            data = self._file.read(2**17)
            if not data:
                if self._frame is not None:
                    raise self._damaged("it ends inside a frame")
                return 0
            self._out = self._decompress(data)
        size = min(len(buffer), len(self._out))
        buffer[:size], self._out = self._out[:size], self._out[size:]
        return size

    def _decompress(self, data: bytes) -> bytes:
        out = b""
        try:
            while data:
                self._frame = self._frame or self._new_frame()
                out += self._frame.decompress(data)
                data = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
        except self._error as error:
            raise self._damaged(str(error)) from None
        return out

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self._path}: not a whole zstd file ({reason}); fetch it again")


def _open_binary(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path))
    return path.open("rb")


def _record_text(line: bytes, at: int, path: Path, field: str) -> str:
    try:
        record = json.loads(decode_utf8(line, str(path), at))
    except json.JSONDecodeError as error:
        cut = "the file ends inside it" if not line.endswith(b"\n") else error.msg
        where = f"{path}, line {_line_number(path, at)}"
        raise UserError(f"{where}: not a complete JSON record ({cut})") from None
    if isinstance(record, dict) and isinstance(record.get(field), str):
        return str(record[field])
    where = f"{path}, line {_line_number(path, at)}"
    if isinstance(record, dict) and field in record:
        raise UserError(f"{where}: field `{field}` is no text but {_type_name(record[field])}")
    has = ", ".join(record) if isinstance(record, dict) else f"a {_type_name(record)}, no object"
    raise UserError(f"{where}: no field `{field}` (there is {has}); set text_field")


def _type_name(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, type(value).__name__
    )


def _line_number(path: Path, at: int) -> int:
    """The line (from 1) that begins at byte `at`."""
    with _open_binary(path) as file:
        number, left = 1, at
        while left > 0 and (block := file.read(min(left, 2**20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def parquet_row_groups(path: Path, field: str) -> int:
    """Number of row groups of a Parquet file that has the column `field`.

    Raises:
        UserError: the file is damaged or has no such column.
    """
    file = _open_parquet(path)
    names = file.schema_arrow.names
    if field not in names:
        raise UserError(
            f"{path}: no column `{field}` (there is {', '.join(names)}); set text_field"
        )
    return int(file.num_row_groups)


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).split(".")[0]
        raise UserError(f"{path}: not a whole Parquet file ({reason}); fetch it again") from None


def read_parquet(path: Path, group: int, field: str) -> Iterator[str]:
    """Text of one row group's rows.

    Raises:
        UserError: the row group is damaged, or a row's `field` is no text.
    """
    import pyarrow as pa

    where, row = f"{path}, row group {group}", 0
    try:
        batches = _open_parquet(path).iter_batches(
            batch_size=1000, row_groups=[group], columns=[field]
        )
        for batch in batches:
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    kind = _type_name(value)
                    raise UserError(f"{where}, row {row}: column `{field}` is no text but {kind}")
                yield value
                row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{where}, after row {row}: damaged ({error}); fetch the file again"
        ) from None
