"""Documents in text files, JSON lines and Parquet, and in datasets of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from bosch.errors import UserError
from data_prep.documents.sources import Kind, Source
from data_prep.source_files import compressible, files_of, is_local, open_plain, register_zstd
from data_prep.text import read_utf8

_ROWS = 16  # of Parquet that are held at once
_TABLES = (*compressible(".csv", ".tsv", ".jsonl", ".ndjson"), ".parquet", ".arrow", ".mds")


def _texts(where: str, path: str) -> list[Path]:
    files = files_of(where, path)
    if table := next((file for file in files if file.name.endswith(_TABLES)), None):
        raise UserError(
            f"{table} holds records, not a text; set its kind, or name the texts by a glob", where
        )
    return files


def _lines(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    with open_plain(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                try:
                    yield place, from_json(line.removeprefix(b"\xef\xbb\xbf"))
                except ValueError as error:
                    raise UserError(f"{place}: not a complete JSON record ({error})") from None


def _rows(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    needed, names = {source.text_field, *source.filters.matches}, file.schema_arrow.names
    has_text = source.text_field in names  # otherwise a message lists all columns
    columns = [name for name in names if name in needed or not has_text]
    row = 0
    for batch in file.iter_batches(_ROWS, columns=columns):
        for record in batch.to_pylist():
            yield f"{path}, row {row}", record
            row += 1


def _shard(number: int, source: Source) -> Iterator[tuple[str, Any]]:
    dataset = _dataset(source)
    where = f"dataset {source.path}, split {source.split}, shard {number}"
    for index, record in enumerate(dataset.shard(dataset.num_shards, number)):
        yield f"{where}, record {index}", record


def _dataset(source: Source) -> Any:
    assert source.path is not None
    return _open_dataset(source.path, source.subset, source.split, source.revision)


@lru_cache(maxsize=4)
def _open_dataset(path: str, subset: str | None, split: str, revision: str | None) -> Any:
    """The split as an IterableDataset; reads only its metadata."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    register_zstd()
    if not is_local(path):
        return load_dataset(path, subset, split=split, revision=revision, streaming=True)
    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return load_dataset(str(folder), subset, split=split, streaming=True)
    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"there is no split '{split}', but {', '.join(dataset)}")
        dataset = dataset[split]
    return dataset.to_iterable_dataset(num_shards=max(1, len(dataset.cache_files)))


KINDS = {
    "text": Kind(
        "a document in each file below `path`",
        lambda path, source: [(str(path), read_utf8(path))],
        find=_texts,
    ),
    "jsonl": Kind(
        "a document in each line of the files below `path`, plain or compressed",
        _lines,
        # A plain .json beside others is metadata, and is read where a glob names it.
        suffixes=(*compressible(".jsonl", ".ndjson"), *compressible(".json")[1:]),
        has_fields=True,
    ),
    "parquet": Kind(
        "a document in each row of the files below `path`",
        _rows,
        suffixes=(".parquet",),
        has_fields=True,
    ),
    "huggingface": Kind(
        "a dataset of the hub, streamed, or a folder of its files or of `save_to_disk`",
        _shard,
        lambda source: range(_dataset(source).num_shards),
        has_fields=True,
        is_dataset=True,
    ),
}
