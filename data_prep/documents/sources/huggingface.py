"""A dataset on the Hugging Face hub or in a folder, streamed; a part is a shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from data_prep.documents.sources import Kind, Part, Source, records
from data_prep.source_files import is_local


class _HuggingFace(Kind):
    about = "a dataset of the hub, streamed, or of `save_to_disk`"
    has_fields = True
    is_dataset = True

    def is_remote(self, path: str) -> bool:
        return not is_local(path)

    def first_record(self, source: Source) -> Mapping[str, Any]:
        return next(iter(_dataset(source)), {})

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return [Part((), number) for number in range(_dataset(source).num_shards)]

    def read(self, part: Part, source: Source) -> Any:
        where = f"source {source.name}: dataset {source.path}, split {source.split}"
        return records().read_dataset(
            where, _dataset(source), part.start, source.text_field, source.filters
        )


def _dataset(source: Source) -> Any:
    assert source.path is not None
    where = f"source {source.name}"
    return records().open_dataset(where, source.path, source.subset, source.split, source.revision)


KIND = _HuggingFace()
