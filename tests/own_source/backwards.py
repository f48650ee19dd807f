"""A kind of source of one file: lines of files, the last first."""

from __future__ import annotations

from data_prep.documents.sources import Kind, Part
from data_prep.text import read_utf8

KINDS = {
    "backwards": Kind(
        "lines below `path`, the last first",
        lambda part, source: reversed(read_utf8(part.paths[0]).splitlines()),
        lambda source: [Part((file,)) for file in source.files],
        suffixes=(".lines",),
    )
}
