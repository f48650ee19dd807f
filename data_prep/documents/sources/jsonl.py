"""JSON lines, plain or compressed; a part is a range of bytes, or a compressed file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from data_prep.documents import sources
from data_prep.documents.sources import BadRecord, Part, Records, Source
from data_prep.source_files import compressible, is_compressed, open_plain

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _JsonLines(Records):
    about = "a document in each line of the files below `path`, plain or compressed"
    # A plain .json beside others is metadata, and is read where a glob names it.
    suffixes = (*compressible(".jsonl", ".ndjson"), *compressible(".json")[1:])

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
        for file in source.files:
            if is_compressed(file):
                yield Part((file,), 0, sys.maxsize)
                continue
            size = max(1, file.stat().st_size)
            for at in range(0, size, sources.PART_BYTES):
                yield Part((file,), at, min(at + sources.PART_BYTES, size))

    def records(self, part: Part, source: Source) -> Iterator[tuple[int, Any]]:
        """The lines that begin in the part, with their offsets."""
        with open_plain(part.paths[0]) as file:
            at = max(part.start - 1, 0)
            if at:
                file.seek(at)
            while at < part.stop and (line := file.readline()):
                # Before the part's start is the end of the previous part's line.
                if at >= part.start and line.strip():
                    yield at, _record(line if at else line.removeprefix(_BYTE_ORDER_MARK))
                at += len(line)

    def place(self, part: Part, source: Source, number: int) -> str:
        """The file, and the line (from 1) that begins at byte `number`."""
        line, unread = 1, number
        with open_plain(part.paths[0]) as file:
            while unread > 0 and (block := file.read(min(unread, 2**20))):
                line += block.count(b"\n")
                unread -= len(block)
        return f"{part.paths[0]}, line {line}"


def _record(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError as error:
        return BadRecord(f"not a complete JSON record ({error})")


KIND = _JsonLines()
