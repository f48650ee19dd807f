"""Sources of training documents, split into parts that workers read independently.

A part is a bounded piece of one source: some text files, a byte range of a JSONL file, a row group,
a shard. Its documents depend only on the part, so the number of workers does not matter.

A kind of source is a file in this folder whose `KIND` finds, checks and reads the documents. It
imports numpy and pyarrow only when parts are read, so that keys and checks of recipes are fast.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bosch.errors import UserError
from data_prep.documents.filters import Filters
from data_prep.documents.mds_index import Shard
from data_prep.source_files import files_of
from data_prep.text import BadRecord, Document

PART_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Source:
    """A source of documents, with the fields of the recipe's `prepare.sources`."""

    name: str
    kind: str
    path: str | None = None
    text_field: str = "text"
    tokenizer: str | None = None
    weight: float = 1.0
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    special_tokens: bool = False
    skip_bad_records: int = 0
    filters: Filters = field(default_factory=Filters)

    @property
    def files(self) -> list[Path]:
        """Its files; raises UserError if there are none."""
        assert self.path is not None
        return KINDS[self.kind].files(f"source {self.name}", self.path)


@dataclass(frozen=True)
class Part:
    """A piece of a source: some files, or a part of one file or dataset.

    `start` is a byte (JSONL), a row group (Parquet) or a shard's number (Hugging Face); `stop` is
    the byte after the part (JSONL); `shard` is a shard of an MDS folder. `retrieval` has no files,
    but a `seed` and the `most_characters` of a document.
    """

    paths: tuple[Path, ...] = ()
    start: int = 0
    stop: int = 0
    shard: Shard | None = None
    seed: int = 0
    most_characters: int = 0


class Kind:
    """A kind of source.

    `about` describes it in the recipe's reference. `needs_path`: its documents are in files; of a
    folder those are read that end with one of `suffixes`. `has_fields`: they are records with
    further fields. `takes_tokenizer`: they may be tokens of another model. `is_dataset`: it has
    subsets and splits. `is_endless`: it generates documents without end, in the order of its parts.
    """

    about = ""
    suffixes: tuple[str, ...] = ("",)
    needs_path = True
    has_fields = False
    takes_tokenizer = False
    is_dataset = False
    is_endless = False

    def is_remote(self, path: str) -> bool:
        """Whether the path is a name on the hub."""
        return False

    def files(self, where: str, path: str) -> list[Path]:
        """Its files, in order; raises UserError, with `where` as its path, if there are none."""
        return files_of(where, path, self.suffixes)

    def identity(self, where: str, path: str) -> list[Path]:
        """Files whose content identifies the documents."""
        return self.files(where, path)

    def check(self, path: str) -> None:
        """Raise UserError if there is no file, only empty files, or a damaged one."""
        files = self.files("", path)
        if not any(file.stat().st_size for file in files):
            raise UserError(f"the corpus at {path} is empty")
        for file in files:
            self.check_file("", file)

    def check_file(self, where: str, file: Path) -> None:
        """Raise UserError for a damaged file, without reading all of it."""

    def first_record(self, source: Source) -> Mapping[str, Any]:
        """The fields of the first record, or the columns that may hold texts; empty if unknown."""
        return {}

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        """The source's parts; an endless source has an order by `seed`."""
        raise NotImplementedError

    def read(self, part: Part, source: Source) -> Iterable[Document | BadRecord | None]:
        """The documents of a part, as in `read_part`."""
        raise NotImplementedError


def records() -> Any:
    """The module of record readers, which loads pyarrow."""
    return importlib.import_module("data_prep.documents.records")


def grouped(files: Sequence[Path], part_bytes: int) -> list[Part]:
    """Parts of at least `part_bytes` from consecutive files; the last may be smaller."""
    parts: list[Part] = []
    group: list[Path] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= part_bytes:
            parts.append(Part(tuple(group)))
            group, size = [], 0
    return [*parts, Part(tuple(group))] if group else parts


def list_parts(source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
    """The source's parts in a random order by `seed`; endless for `retrieval`.

    Raises UserError if there is no file or a header is damaged; RunError if the hub cannot be
    reached.
    """
    kind = KINDS[source.kind]
    if kind.is_endless:
        yield from kind.parts(source, seed, sequence_length)
        return
    parts = list(kind.parts(source, seed, sequence_length))
    rng = importlib.import_module("numpy").random.default_rng([seed, 0])
    for index in rng.permutation(len(parts)):
        yield parts[index]


def read_part(part: Part, source: Source) -> Iterator[Document | BadRecord | None]:
    """The part's documents, empty ones included; None for a document that a pattern leaves out.

    Raises UserError, with the file and the byte, line, row or sample, if a file is damaged, and
    RunError if the hub cannot be reached.
    """
    yield from KINDS[source.kind].read(part, source)


KINDS: dict[str, Kind] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").KIND
    for module in pkgutil.iter_modules(__path__)
}

if TYPE_CHECKING:
    SourceKind = str
else:
    SourceKind = Literal[*KINDS]
