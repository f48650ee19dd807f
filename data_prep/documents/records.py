"""Texts from records, streamed: JSONL (plain, gzip, zstd), Parquet and Hugging Face datasets.

Errors name the record.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from bosch.errors import RunError, UserError
from bosch.files import check_hub_cache, open_regular
from data_prep.documents.filters import Filters
from data_prep.source_files import is_local
from data_prep.text import decode_utf8

# A longer line is no record, but a file of another kind.
MAX_RECORD_BYTES = 64 * 2**20
_TOO_LARGE = f"a record of more than {MAX_RECORD_BYTES >> 20} MB; split it or leave it out"
_BATCH_BYTES = 2**24
_PARQUET_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError)


def is_compressed(path: Path) -> bool:
    return path.suffix in (".gz", ".zst")


def read_jsonl(
    path: Path, start: int, stop: int, field: str, filters: Filters
) -> Iterator[str | None]:
    """Texts of the records that begin in bytes `start` to `stop`; all of a compressed file.

    None stands for a record that `filters` leave out. Raises UserError if a record is truncated,
    not JSON, not UTF-8, or has no text in `field`.
    """
    for at, line in _jsonl_lines(path, start, stop):
        yield _record_text(line, at, path, field, filters)


def read_rows(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records of a JSONL or Parquet file; for Parquet only the columns `fields`.

    Raises UserError if the file or a record is damaged, too large, or not a JSON object.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet_file(path, fields)
        return
    for at, line in _jsonl_lines(path, 0, sys.maxsize):
        record, _ = _record(line, at, path)
        if not isinstance(record, dict):
            raise _record_fault(path, at, f"expected a JSON object, not {_type_name(record)}")
        yield record


def _jsonl_lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines that begin in bytes `start` to `stop`, with their offsets."""
    try:
        with _open_binary(path) as file:
            at = max(start - 1, 0)
            if at:
                file.seek(at)
            while at < stop or is_compressed(path):
                line = file.readline(MAX_RECORD_BYTES + 1)
                if not line:
                    break
                if len(line) > MAX_RECORD_BYTES:
                    raise _record_fault(path, at, _TOO_LARGE)
                if at >= start and line.strip():  # before it, the end of the previous part's line
                    yield at, line
                at += len(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read to its end ({error}); get it again") from None


def _open_binary(path: Path) -> io.BufferedIOBase | BinaryIO:
    """Open a file, decompressed; a truncated file raises OSError at its end."""
    if is_compressed(path):
        open_regular(path).close()  # no pipe, which would never end
        return io.BufferedReader(pa.input_stream(str(path), compression="detect"))
    return open_regular(path)


def _record_text(line: bytes, at: int, path: Path, field: str, filters: Filters) -> str | None:
    record, checked = _record(line, at, path)
    problem = text_problem(record, field, checked=checked)
    if problem is not None:
        raise _record_fault(path, at, problem)
    return str(record[field]) if filters.allow_record(record) else None


def _record(line: bytes, at: int, path: Path) -> tuple[Any, bool]:
    """A line's record, and whether its text is known to have no lone surrogates."""
    try:
        return _parse(line, path, at)
    except json.JSONDecodeError as error:
        reason = error.msg if line.endswith(b"\n") else "the file ends inside it"
        problem = f"not a complete JSON record ({reason})"
    except RecursionError:
        problem = "a record that is nested too deeply; leave it out"
    raise _record_fault(path, at, problem)


def text_problem(record: Any, field: str, *, checked: bool = False) -> str | None:
    """Why a record has no valid text in `field`, or None.

    `checked`: its text is known to have no lone surrogates.
    """
    if not isinstance(record, dict):
        return f"expected a JSON object, not {_type_name(record)}"
    if field not in record:
        return f"no field `{field}` (there is {printable(', '.join(record))}); set text_field"
    if not isinstance(record[field], str):
        return f"field `{field}` is {_type_name(record[field])}, not text"
    if not checked and not _is_utf8(record[field]):
        return f"field `{field}` has half a surrogate pair (\\ud800 to \\udfff), no character"
    return None


def _record_fault(path: Path, at: int, problem: str) -> UserError:
    return UserError(f"{path}, line {_line_number(path, at)}: {problem}")


def _parse(line: bytes, path: Path, at: int) -> tuple[Any, bool]:
    """The record, and whether its text is known to have no lone surrogates."""
    try:
        return from_json(line), True
    except ValueError:
        # Python's parser is slower, but accepts some more records and explains errors.
        text = decode_utf8(line, str(path), at)
    try:
        return json.loads(text), False
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses integers of more than 4,300 digits; as floats they are infinite.
        return json.loads(text, parse_int=float), False


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Text of an untrusted file for a message: shortened, without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in text[:201])
    return text if len(text) <= 200 else f"{text[:200]} …"


def _type_name(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, f"of type {type(value).__name__}"
    )


def _line_number(path: Path, at: int) -> int:
    """The line (from 1) that begins at byte `at`."""
    with _open_binary(path) as file:
        number, unread = 1, at
        while unread > 0 and (block := file.read(min(unread, 2**20))):
            number += block.count(b"\n")
            unread -= len(block)
    return number


def parquet_row_groups(path: Path, field: str) -> int:
    """Number of row groups of a Parquet file that has the column `field`.

    Raises UserError if the file is damaged or has no such column of single values.
    """
    file = _open_parquet(path)
    names = file.schema_arrow.names
    if field not in names:
        raise UserError(
            f"{path}: no column `{field}` (there is {printable(', '.join(names))}); set text_field"
        )
    kind = file.schema_arrow.field(names.index(field)).type
    if pa.types.is_nested(kind):
        raise UserError(f"{path}: column `{field}` is of type {printable(str(kind))}, not text")
    return int(file.num_row_groups)


def _open_parquet(path: Path, texts: Sequence[str] = ()) -> Any:
    try:
        open_regular(path).close()  # no pipe, which would never end
        # Repeated texts are shared, since a small file may repeat a large text very often.
        return pq.ParquetFile(path, read_dictionary=list(texts))
    except _PARQUET_FAULTS as error:
        reason = _reason(error)
        raise UserError(f"{path}: not a whole Parquet file ({reason}); get it again") from None


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split(".")[0].split()))


def read_parquet(path: Path, group: int, field: str, filters: Filters) -> Iterator[str | None]:
    """Texts of a row group's rows; None for a row that `filters` leave out.

    Raises UserError if the row group is damaged, or a row's `field` is not text.
    """
    where = f"{path}, row group {group}"
    rows = _parquet_rows(path, where, [group], [field], list(filters.matches))
    for row, record in enumerate(rows):
        value = record.get(field)
        if not isinstance(value, str):
            kind = _type_name(value)
            raise UserError(f"{where}, row {row}: column `{field}` is {kind}, not text")
        yield value if filters.allow_record(record) else None


def _read_parquet_file(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, which must have the columns `fields`."""
    schema = _open_parquet(path).schema_arrow
    for name in fields:
        if name not in schema.names:
            names = printable(", ".join(schema.names))
            raise UserError(f"{path}: no column `{name}` (there is {names})")
        if pa.types.is_nested(kind := schema.field(name).type):
            raise UserError(f"{path}: column `{name}` is of type {printable(str(kind))}")
    yield from _parquet_rows(path, str(path), None, fields)


def _parquet_rows(
    path: Path,
    where: str,
    groups: Sequence[int] | None,
    fields: Sequence[str],
    optional: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """The rows of some or all row groups: the columns `fields`, and those of `optional` that exist.

    `optional` columns may have values of any type.
    """
    row, names = 0, list(dict.fromkeys([*fields, *optional]))
    try:
        file = _open_parquet(path, fields)
        for group in range(file.num_row_groups) if groups is None else groups:
            rows = min(_rows_per_batch(file, group, name) for name in fields)
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=names):
                columns = [_values(column, where, row) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    yield dict(zip(batch.schema.names, values, strict=True))
                    row += 1
    except _PARQUET_FAULTS as error:
        raise UserError(
            f"{where}, after row {row}: damaged ({_reason(error)}); get the file again"
        ) from None


def _values(column: Any, where: str, first: int) -> list[Any]:
    """A column's values from row `first` on; repeated values are shared.

    Raises UserError for a huge value.
    """
    if not isinstance(column, pa.DictionaryArray):
        return list(column.to_pylist())
    indices = column.indices.to_pylist()
    values: dict[int, Any] = {}  # the dictionary also has values of earlier rows
    for row, index in enumerate(indices, first):
        if index is not None and index not in values:
            value = column.dictionary[index]
            if len(value.as_buffer() or b"") > MAX_RECORD_BYTES:
                raise UserError(f"{where}, row {row}: {_TOO_LARGE}")
            values[index] = value.as_py()
    return [None if index is None else values[index] for index in indices]


def _rows_per_batch(file: Any, group: int, field: str) -> int:
    """Number of rows that fit the memory bound, by their mean size."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(index) for index in range(metadata.num_columns))
    size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
    mean = max(1, size // max(1, metadata.num_rows))
    return int(min(1000, max(1, _BATCH_BYTES // mean)))


@lru_cache(maxsize=4)
def open_dataset(
    where: str, path: str, subset: str | None, split: str, revision: str | None
) -> Any:
    """The split as an IterableDataset; reads only its metadata.

    Raises UserError, which begins with `where`, if there is no such dataset, subset or split, and
    RunError if the hub cannot be reached.
    """
    from datasets import load_dataset
    from fsspec.compression import compr, register_compression

    # Files are opened with fsspec, since datasets needs another package for .zst.
    if "zstd" not in compr:
        register_compression(
            "zstd", lambda file, mode="rb", **_: pa.input_stream(file, compression="zstd"), "zst"
        )
    local = is_local(path)
    name = str(Path(path).expanduser()) if local else path
    commit = None if local else revision
    try:
        return load_dataset(name, subset, split=split, revision=commit, streaming=True)
    except Exception as error:
        raise _dataset_fault(f"{where}: dataset {path}", error) from None


def read_dataset(
    where: str, dataset: Any, number: int, field: str, filters: Filters
) -> Iterator[str | None]:
    """Texts of a shard's records; None for a record that `filters` leave out.

    Raises UserError, with shard and record, if a record is damaged or has no text in `field`.
    """
    row = 0
    try:
        for record in dataset.shard(dataset.num_shards, number):
            problem = text_problem(record, field)
            if problem:
                raise UserError(f"{where}, shard {number}, record {row}: {problem}")
            yield record[field] if filters.allow_record(record) else None
            row += 1
    except (UserError, GeneratorExit):
        raise
    except Exception as error:
        raise _dataset_fault(f"{where}, shard {number}, after record {row}", error) from None


def _dataset_fault(where: str, error: Exception) -> UserError | RunError:
    """The error to raise: RunError for a failure of the network, otherwise UserError.

    Raises OSError if the disk of the hub's cache is full.
    """
    check_hub_cache(error)
    reason = printable(" ".join(str(error).split()) or type(error).__name__)
    if isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__:
        return RunError(f"{where}: the hub cannot be reached ({reason}); run again")
    return UserError(f"{where}: cannot be read ({reason})")
