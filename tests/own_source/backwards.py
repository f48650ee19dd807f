"""A kind of source of one file: lines of files, the last first."""

from __future__ import annotations

from data_prep.documents.sources import Kind
from data_prep.text import read_utf8

KINDS = {
    "backwards": Kind(
        "lines below `path`, the last first",
        lambda path, source: ((str(path), line) for line in read_utf8(path).splitlines()[::-1]),
        suffixes=(".lines",),
    )
}
