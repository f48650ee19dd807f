"""Texts from records, streamed: JSON lines, CSV, Parquet and Hugging Face datasets.

Filters come first; a record that passes them and has no text is a `BadRecord`, which names it.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from bosch.errors import RunError, UserError
from bosch.files import check_hub_cache, open_regular
from data_prep.compressed import (
    LARGE_WINDOW,
    READ_FAULTS,
    has_large_window,
    is_compressed,
    open_plain,
    read_fault,
)
from data_prep.documents.filters import Filters
from data_prep.source_files import is_local
from data_prep.text import BadRecord

# A longer line is no record, but a file of another kind.
MAX_RECORD_BYTES = 64 * 2**20
_BATCH_BYTES = 2**24
_PARQUET_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Text = str | BadRecord | None


def _text(record: Any, field: str, filters: Filters, where: str | Callable[[], str]) -> Text:
    """A record's text; None if `filters` leave it out."""
    if not isinstance(record, Mapping):
        problem = f"expected an object, not {_type_name(record)}"
    elif not filters.allow_record(record):
        return None
    elif field not in record:
        names = printable(", ".join(map(str, record)))
        problem = f"no field `{field}` (there is {names}); set text_field"
    elif not isinstance(text := record[field], str):
        problem = f"field `{field}` is {_type_name(text)}, not text"
    else:
        return text
    return BadRecord(f"{where if isinstance(where, str) else where()}: {problem}")


def read_jsonl(path: Path, start: int, stop: int, field: str, filters: Filters) -> Iterator[Text]:
    """Texts of the records that begin in bytes `start` to `stop`; all of a compressed file.

    Raises UserError if the file is damaged or no file of lines.
    """
    for at, line in _lines(path, start, stop):
        record = _record(path, at, line)
        if isinstance(record, BadRecord):
            yield record
        else:
            yield _text(record, field, filters, partial(_place, path, at))


def first_json(path: Path) -> dict[str, Any]:
    """The first record of a file of JSON lines, empty without one; UserError if it is no object."""
    at, line = next(_lines(path, 0, sys.maxsize), (0, b"{}"))
    record = _record(path, at, line)
    if not isinstance(record, dict):
        fault = f"{_place(path, at)}: expected an object, not {_type_name(record)}"
        raise UserError(record.fault if isinstance(record, BadRecord) else fault)
    return record


def _lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines that begin in bytes `start` to `stop`, with their offsets."""
    try:
        if is_compressed(path):
            start, stop = 0, sys.maxsize
        with open_plain(path) as file:
            at = max(start - 1, 0)
            if at:
                file.seek(at)
            while at < stop and (line := file.readline(MAX_RECORD_BYTES + 1)):
                if len(line) > MAX_RECORD_BYTES:
                    raise UserError(
                        f"{_place(path, at)}: a record of more than {MAX_RECORD_BYTES >> 20} MB; "
                        "split it or leave it out"
                    )
                if at >= start and line.strip():  # before it, the end of the previous part's line
                    yield at, line if at else line.removeprefix(_BYTE_ORDER_MARK)
                at += len(line)
    except READ_FAULTS as error:
        raise read_fault(path, error) from None


def _record(path: Path, at: int, line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError as error:
        reason = str(error).replace(" at line 1 column ", " at byte ")
        if not line.endswith(b"\n"):
            reason = "the file ends inside it"
        return BadRecord(f"{_place(path, at)}: not a complete JSON record ({reason})")


def _place(path: Path, at: int) -> str:
    """The file, and the line (from 1) that begins at byte `at`."""
    with open_plain(path) as file:
        number, unread = 1, at
        while unread > 0 and (block := file.read(min(unread, 2**20))):
            number += block.count(b"\n")
            unread -= len(block)
    return f"{path}, line {number}"


def read_csv(path: Path, field: str, filters: Filters) -> Iterator[Text]:
    """Texts of a table's rows, with the names of the columns in its first line."""
    for line, row in csv_rows(path):
        where = f"{path}, line {line}"
        if None in row:
            yield BadRecord(f"{where}: more values than the first line has names")
        else:
            yield _text(row, field, filters, where)


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table, with their last lines. Raises UserError if it is damaged."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    line = 1
    try:
        with io.TextIOWrapper(open_plain(path), "utf-8-sig", newline="") as file:
            delimiter = "\t" if ".tsv" in path.suffixes else ","
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in rows:
                line = rows.line_num
                yield line, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}, after line {line}: no table of UTF-8 text ({error})") from None
    except READ_FAULTS as error:
        raise read_fault(path, error) from None


def printable(text: str) -> str:
    """Text of a file for a message: shortened, without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in text[:201])
    return text if len(text) <= 200 else f"{text[:200]} …"


def _type_name(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, f"of type {type(value).__name__}"
    )


def parquet_row_groups(path: Path, field: str) -> int:
    """Number of row groups of a Parquet file that has the column `field`.

    Raises UserError if the file is damaged or has no such column of single values.
    """
    file = _open_parquet(path)
    schema = file.schema_arrow
    if field not in schema.names:
        names = printable(", ".join(schema.names))
        raise UserError(f"{path}: no column `{field}` (there is {names}); set text_field")
    if pa.types.is_nested(kind := schema.field(field).type):
        raise UserError(f"{path}: column `{field}` is of type {printable(str(kind))}, not text")
    return int(file.num_row_groups)


def _open_parquet(path: Path) -> Any:
    try:
        open_regular(path).close()  # no pipe, which would never end
        return pq.ParquetFile(path)
    except _PARQUET_FAULTS as error:
        reason = _reason(error)
        raise UserError(f"{path}: not a whole Parquet file ({reason}); get it again") from None


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split(".")[0].split()))


def read_parquet(path: Path, group: int, field: str, filters: Filters) -> Iterator[Text]:
    """Texts of a row group's rows; raises UserError if it is damaged."""
    names = [*dict.fromkeys([field, *filters.matches])]
    for row, record in enumerate(parquet_rows(path, group, names)):
        where = f"{path}, row group {group}, row {row}"
        yield _text(record, field, filters, where)


def parquet_rows(
    path: Path, group: int, names: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a row group: all columns, or those of `names` that exist."""
    row = 0
    try:
        file = _open_parquet(path)
        metadata = file.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        size = sum(
            column.total_uncompressed_size
            for column in columns
            if names is None or column.path_in_schema in names
        )
        mean = max(1, size // max(1, metadata.num_rows))
        rows = min(1000, max(1, _BATCH_BYTES // mean))
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=names):
            for record in batch.to_pylist():
                yield record
                row += 1
    except _PARQUET_FAULTS as error:
        raise UserError(
            f"{path}, row group {group}, after row {row}: damaged ({_reason(error)}); get the file "
            "again"
        ) from None


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
        if local and is_saved_dataset(Path(name)):
            return _saved_dataset(name, split)
        return load_dataset(name, subset, split=split, revision=commit, streaming=True)
    except Exception as error:
        raise _dataset_fault(f"{where}: dataset {path}", error) from None


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of datasets."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved_dataset(folder: str, split: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(folder)
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"it has the splits {', '.join(map(str, dataset))}")
        dataset = dataset[split]
    elif str(dataset.split or split) != split:
        raise ValueError(f"it has only the split {dataset.split}")
    return dataset.to_iterable_dataset(num_shards=max(1, len(dataset.cache_files)))


def read_dataset(
    where: str, dataset: Any, number: int, field: str, filters: Filters
) -> Iterator[Text]:
    """Texts of a shard's records; raises UserError if the shard is damaged."""
    row = 0
    try:
        for record in dataset.shard(dataset.num_shards, number):
            place = f"{where}, shard {number}, record {row}"
            yield _text(record, field, filters, place)
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
    return UserError(
        f"{where}: cannot be read ({LARGE_WINDOW if has_large_window(reason) else reason})"
    )
