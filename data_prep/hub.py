"""Documents of a Hugging Face dataset, streamed: a name on the hub or a directory of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from bosch.errors import RunError, UserError
from data_prep.filters import Filters
from data_prep.records import printable, text_problem
from data_prep.source_files import is_local


def open_dataset(
    where: str, path: str, subset: str | None, split: str, revision: str | None
) -> Any:
    """The split as an IterableDataset; nothing but its metadata is read.

    Raises:
        UserError: there is no such dataset, subset or split; `where` stands before the sentence.
        RunError: the hub cannot be reached.
    """
    from datasets import load_dataset

    _register_zstd()
    local = is_local(path)
    name = str(Path(path).expanduser()) if local else path
    commit = None if local else revision
    try:
        return load_dataset(name, subset, split=split, revision=commit, streaming=True)
    except Exception as error:
        raise _fault(f"{where}: dataset {path}", error) from None


def _register_zstd() -> None:
    """Have fsspec, by which datasets opens files, read .zst as a source of kind jsonl does.

    By itself it does so only where one more package is installed.
    """
    from fsspec.compression import compr, register_compression

    if "zstd" not in compr:
        register_compression(
            "zstd", lambda file, mode="rb", **_: pa.input_stream(file, compression="zstd"), "zst"
        )


def read_dataset(
    where: str, dataset: Any, number: int, field: str, filters: Filters
) -> Iterator[str | None]:
    """Texts of one shard's records; None for a record that a pattern leaves out.

    Raises:
        UserError: a record is damaged or has no text in `field`; names shard and record.
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
        raise _fault(f"{where}, shard {number}, after record {row}", error) from None


def _fault(where: str, error: Exception) -> UserError | RunError:
    """A network's failure may pass by itself; anything else is the dataset's fault."""
    reason = printable(" ".join(str(error).split()) or type(error).__name__)
    if isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__:
        return RunError(f"{where}: the hub cannot be reached ({reason}); run again")
    return UserError(f"{where}: cannot be read ({reason})")
