"""A dataset on the Hugging Face hub or in a folder, streamed; a part is a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from bosch.errors import RunError, UserError
from bosch.files import check_hub_cache
from data_prep.documents.sources import Part, Records, Source
from data_prep.source_files import is_local


class _HuggingFace(Records):
    about = "a dataset of the hub, streamed, or of `save_to_disk`"
    is_dataset = True

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return [Part((), number) for number in range(_dataset(source).num_shards)]

    def records(self, part: Part, source: Source) -> Iterator[tuple[int, Any]]:
        dataset = _dataset(source)
        yield from enumerate(dataset.shard(dataset.num_shards, part.start))

    def place(self, part: Part, source: Source, number: int) -> str:
        return f"dataset {source.path}, split {source.split}, shard {part.start}, record {number}"


def _dataset(source: Source) -> Any:
    assert source.path is not None
    try:
        return _open(source.path, source.subset, source.split, source.revision)
    except Exception as error:
        check_hub_cache(error)
        where = f"source {source.name}: dataset {source.path}"
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__:
            raise RunError(f"{where}: the hub cannot be reached ({reason}); run again") from None
        raise UserError(f"{where}: cannot be read ({reason})") from None


@lru_cache(maxsize=4)
def _open(path: str, subset: str | None, split: str, revision: str | None) -> Any:
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


KIND = _HuggingFace()
