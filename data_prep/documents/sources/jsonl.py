"""JSON lines, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from data_prep.compressed import compressible, is_compressed
from data_prep.documents import sources
from data_prep.documents.sources import Kind, Part, Source, records


class _JsonLines(Kind):
    about = "a document in each line of the files below `path`, plain or compressed"
    # A plain .json beside others is metadata, and is read where a glob names it.
    suffixes = (*compressible(".jsonl", ".ndjson"), *compressible(".json")[1:])
    has_fields = True

    def first_record(self, source: Source) -> Mapping[str, Any]:
        return records().first_json(source.files[0])

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        for file in source.files:
            # A compressed file is one part.
            size = 1 if is_compressed(file) else max(1, file.stat().st_size)
            for at in range(0, size, sources.PART_BYTES):
                yield Part((file,), at, min(at + sources.PART_BYTES, size))

    def read(self, part: Part, source: Source) -> Any:
        return records().read_jsonl(
            part.paths[0], part.start, part.stop, source.text_field, source.filters
        )


KIND = _JsonLines()
