"""Documents in text files, JSON lines, CSV and Parquet, and in datasets of Hugging Face."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from bosch.errors import RunError, UserError
from bosch.files import check_hub_cache
from data_prep.documents.sources import BadRecord, Kind, Part, Source
from data_prep.source_files import compressible, files_of, is_compressed, is_local, open_plain
from data_prep.text import read_utf8

PART_BYTES = 4 * 2**20
_ROWS = 16  # of Parquet that are held at once
_MOST_CHARACTERS = 2**31 - 1  # of a field of CSV; the default of the csv module is 131,072
_TABLES = (*compressible(".csv", ".tsv", ".jsonl", ".ndjson"), ".parquet", ".arrow", ".mds")


def _texts(where: str, path: str) -> list[Path]:
    files = files_of(where, path)
    if table := next((file for file in files if file.name.endswith(_TABLES)), None):
        raise UserError(
            f"{table} holds records, not a text; set its kind, or name the texts by a glob", where
        )
    return files


def grouped(files: Sequence[Path], part_bytes: int) -> Iterator[Part]:
    """Parts of at least `part_bytes` from consecutive files; the last may be smaller."""
    group: list[Path] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= part_bytes:
            yield Part(tuple(group))
            group, size = [], 0
    if group:
        yield Part(tuple(group))


def _byte_ranges(source: Source) -> Iterator[Part]:
    """Ranges of bytes of JSON lines, or a whole compressed file."""
    for file in source.files:
        if is_compressed(file):
            yield Part((file,), (0, sys.maxsize))
            continue
        for at in range(0, file.stat().st_size, PART_BYTES):
            yield Part((file,), (at, at + PART_BYTES))


def _lines(part: Part, source: Source) -> Iterator[tuple[int, Any]]:
    """The lines that begin in the part, with their offsets."""
    start, stop = part.piece
    with open_plain(part.paths[0]) as file:
        at = max(start - 1, 0)
        if at:
            file.seek(at)
        while at < stop and (line := file.readline()):
            # Before the part's start is the end of the previous part's line.
            if at >= start and line.strip():
                yield at, _json(line if at else line.removeprefix(b"\xef\xbb\xbf"))
            at += len(line)


def _json(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError as error:
        return BadRecord(f"not a complete JSON record ({error})")


def _line_at(part: Part, source: Source, offset: int) -> str:
    line = 1
    with open_plain(part.paths[0]) as file:
        while offset > 0:
            offset -= len(file.readline())
            line += 1
    return f"{part.paths[0]}, line {line}"


def _csv(part: Part, source: Source) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_MOST_CHARACTERS)
    [path] = part.paths
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    with io.TextIOWrapper(open_plain(path), "utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        yield from ((rows.line_num, row) for row in rows)


def _row_groups(source: Source) -> Iterator[Part]:
    for file in source.files:
        try:
            groups = _open_parquet(file).num_row_groups
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: not a whole Parquet file ({error})") from None
        yield from (Part((file,), group) for group in range(groups))


def _rows(part: Part, source: Source) -> Iterator[tuple[int, Any]]:
    file, row = _open_parquet(part.paths[0]), 0
    needed, names = {source.text_field, *source.filters.matches}, file.schema_arrow.names
    has_text = source.text_field in names  # otherwise a message lists all columns
    columns = [name for name in names if name in needed or not has_text]
    for batch in file.iter_batches(_ROWS, row_groups=[part.piece], columns=columns):
        for record in batch.to_pylist():
            yield row, record
            row += 1


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path)


def _shards(source: Source) -> Iterable[Part]:
    return [Part((), number) for number in range(_dataset(source).num_shards)]


def _shard(part: Part, source: Source) -> Iterable[tuple[int, Any]]:
    dataset = _dataset(source)
    return enumerate(dataset.shard(dataset.num_shards, part.piece))


def _dataset(source: Source) -> Any:
    assert source.path is not None
    try:
        return _open_dataset(source.path, source.subset, source.split, source.revision)
    except Exception as error:
        check_hub_cache(error)
        where = f"source {source.name}: dataset {source.path}"
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__:
            raise RunError(f"{where}: the hub cannot be reached ({reason}); run again") from None
        raise UserError(f"{where}: cannot be read ({reason})") from None


@lru_cache(maxsize=4)
def _open_dataset(path: str, subset: str | None, split: str, revision: str | None) -> Any:
    """The split as an IterableDataset; reads only its metadata."""
    import pyarrow as pa
    from datasets import DatasetDict, load_dataset, load_from_disk
    from fsspec.compression import compr, register_compression

    if "zstd" not in compr:  # for .zst fsspec needs another package
        register_compression(
            "zstd", lambda file, mode="rb", **_: pa.input_stream(file, compression="zstd"), "zst"
        )
    if not is_local(path):
        return load_dataset(path, subset, split=split, revision=revision, streaming=True)
    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return load_dataset(str(folder), subset, split=split, streaming=True)
    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        dataset = dataset[split]
    return dataset.to_iterable_dataset(num_shards=max(1, len(dataset.cache_files)))


KINDS = {
    "text": Kind(
        "a document in each file below `path`",
        lambda part, source: map(read_utf8, part.paths),
        lambda source: grouped(source.files, PART_BYTES),
        find=_texts,
    ),
    "jsonl": Kind(
        "a document in each line of the files below `path`, plain or compressed",
        _lines,
        _byte_ranges,
        _line_at,
        # A plain .json beside others is metadata, and is read where a glob names it.
        (*compressible(".jsonl", ".ndjson"), *compressible(".json")[1:]),
    ),
    "csv": Kind(
        "a document in each row of the tables below `path`, whose first line names the columns",
        _csv,
        lambda source: [Part((file,)) for file in source.files],
        lambda part, source, number: f"{part.paths[0]}, line {number}",
        compressible(".csv", ".tsv"),
    ),
    "parquet": Kind(
        "a document in each row of the files below `path`",
        _rows,
        _row_groups,
        lambda part, source, number: f"{part.paths[0]}, row group {part.piece}, row {number}",
        (".parquet",),
    ),
    "huggingface": Kind(
        "a dataset of the hub, streamed, or of `save_to_disk`",
        _shard,
        _shards,
        lambda part, source, number: (
            f"dataset {source.path}, split {source.split}, shard {part.piece}, record {number}"
        ),
        is_dataset=True,
    ),
}
