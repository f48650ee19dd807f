"""Tables of comma- or tab-separated values; a part is a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from data_prep.compressed import compressible
from data_prep.documents.sources import Kind, Part, Source, records


class _Csv(Kind):
    about = "a document in each row of the tables below `path`, whose first line names the columns"
    suffixes = compressible(".csv", ".tsv")
    has_fields = True

    def first_record(self, source: Source) -> Mapping[str, Any]:
        return next((row for _, row in records().csv_rows(source.files[0])), {})

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return [Part((file,)) for file in source.files]

    def read(self, part: Part, source: Source) -> Any:
        return records().read_csv(part.paths[0], source.text_field, source.filters)


KIND = _Csv()
