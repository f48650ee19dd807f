"""Tables of comma- or tab-separated values; a part is a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from data_prep.documents.sources import Part, Records, Source
from data_prep.source_files import compressible, open_plain

_MOST_CHARACTERS = 2**31 - 1  # of a field; the default of the csv module is 131,072


class _Csv(Records):
    about = "a document in each row of the tables below `path`, whose first line names the columns"
    suffixes = compressible(".csv", ".tsv")

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        return [Part((file,)) for file in source.files]

    def records(self, part: Part, source: Source) -> Iterator[tuple[int, Any]]:
        csv.field_size_limit(_MOST_CHARACTERS)
        [path] = part.paths
        delimiter = "\t" if ".tsv" in path.suffixes else ","
        with io.TextIOWrapper(open_plain(path), "utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in rows:
                yield rows.line_num, row

    def place(self, part: Part, source: Source, number: int) -> str:
        return f"{part.paths[0]}, line {number}"


KIND = _Csv()
