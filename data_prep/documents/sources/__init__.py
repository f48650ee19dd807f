"""Sources of training documents, split into parts that workers read independently.

A part is a bounded piece of one source: some text files, a byte range of a JSONL file, a row group,
a shard. Its documents depend only on the part, so the number of workers does not matter.

A kind of source is a file in this folder whose `KIND` finds and reads the documents. It imports
numpy and pyarrow only when parts are read, so that keys and checks of recipes are fast.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bosch.errors import RunError, UserError
from data_prep.documents.filters import Filters
from data_prep.documents.mds_index import Shard
from data_prep.source_files import files_of, is_local

if TYPE_CHECKING:
    from data_prep.documents.conversations import Conversation

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
    loss: Literal["all", "completion"] = "all"
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


@dataclass(frozen=True)
class BadRecord:
    """A record that is no document: what is wrong, and where."""

    fault: str


# A text, a conversation, or None for a document that a pattern leaves out.
Document: TypeAlias = "str | Conversation | BadRecord | None"


class Kind:
    """A kind of source.

    `about` describes it in the recipe's reference. `needs_path`: its documents are in files; of a
    folder those are read that end with one of `suffixes`. `has_fields`: they are records with
    further fields. `is_dataset`: it has subsets and splits. `is_endless`: it generates documents
    without end, in the order of its parts.
    """

    about = ""
    suffixes: tuple[str, ...] = ("",)
    needs_path = True
    has_fields = False
    is_dataset = False
    is_endless = False

    def is_remote(self, path: str) -> bool:
        """Whether the path is a name on the hub."""
        return self.is_dataset and not is_local(path)

    def files(self, where: str, path: str) -> list[Path]:
        """Its files, in order; raises UserError, with `where` as its path, if there are none."""
        return files_of(where, path, self.suffixes)

    def identity(self, where: str, path: str) -> list[Path]:
        """Files whose content identifies the documents."""
        return self.files(where, path)

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        """The source's parts; an endless source has an order by `seed`."""
        raise NotImplementedError

    def read(self, part: Part, source: Source) -> Iterable[Document]:
        """The documents of a part, as in `read_part`."""
        raise NotImplementedError


class Records(Kind):
    """A kind whose documents are texts or conversations in records."""

    has_fields = True

    def records(self, part: Part, source: Source) -> Iterable[tuple[int, Any]]:
        """The records of a part, each with a number for `place`."""
        raise NotImplementedError

    def place(self, part: Part, source: Source, number: int) -> str:
        """Where a record is, for a message."""
        raise NotImplementedError

    def read(self, part: Part, source: Source) -> Iterator[Document]:
        """Filters come first; a record that passes them and has no text is a `BadRecord`."""
        conversations = importlib.import_module("data_prep.documents.conversations")
        field = source.text_field
        for number, record in self.records(part, source):
            place = partial(self.place, part, source, number)
            if isinstance(record, Mapping):
                if not source.filters.allow_record(record):
                    yield None
                    continue
                if source.loss == "all" and isinstance(text := record.get(field), str):
                    yield text
                    continue
                if (messages := conversations.messages_of(record, field)) is not None:
                    yield conversations.Conversation(messages, place)
                    continue
            yield BadRecord(f"{place()}: {_problem(record, source)}")


def _problem(record: Any, source: Source) -> str:
    field = source.text_field
    if isinstance(record, BadRecord):
        return record.fault
    if not isinstance(record, Mapping):
        return f"expected an object, found {record!r:.80}"
    if source.loss == "completion":
        return "no messages, and no prompt with a completion, as `loss: completion` needs them"
    if field not in record:
        return f"no field `{field}` (there is {', '.join(map(str, record)):.200}); set text_field"
    return f"field `{field}` is {record[field]!r:.80}, not text"


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
    """The source's parts in a random order by `seed`; endless for `retrieval`."""
    kind = KINDS[source.kind]
    if kind.is_endless:
        yield from kind.parts(source, seed, sequence_length)
        return
    parts = list(kind.parts(source, seed, sequence_length))
    rng = importlib.import_module("numpy").random.default_rng([seed, 0])
    for index in rng.permutation(len(parts)):
        yield parts[index]


def read_part(part: Part, source: Source) -> Iterator[Document]:
    """The part's documents, empty ones included; None for a document that a pattern leaves out.

    Raises UserError, which names the source and the files, if they are damaged.
    """
    try:
        yield from KINDS[source.kind].read(part, source)
    except (UserError, RunError):
        raise
    except Exception as error:  # of a library that reads the files
        files = ", ".join(map(str, part.paths)) or source.path
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"source {source.name}: {files} cannot be read ({reason})") from error


KINDS: dict[str, Kind] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").KIND
    for module in pkgutil.iter_modules(__path__)
}

if TYPE_CHECKING:
    SourceKind = str
else:
    SourceKind = Literal[*KINDS]
