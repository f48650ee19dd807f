"""Sources of training documents, split into parts that workers read independently.

A part is a bounded piece of one source: some text files, a byte range of a JSONL file, a row group,
a shard. Its documents depend only on the part, so the number of workers does not matter.

A kind of source is an entry of `KINDS` in a file of this folder. The file imports numpy and pyarrow
only when parts are read, so that keys and checks of recipes are fast.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bosch.errors import RunError, UserError
from data_prep.source_files import files_of, is_local

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Filters:
    """Conditions on documents. Bounds are inclusive; tokens exclude the end-of-text token.

    `matches` maps fields to regular expressions, which are searched in their values. A missing or
    null field matches nothing. Booleans are written true or false, other values as in Python.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    matches: Mapping[str, str] = field(default_factory=dict)

    def allow_record(self, record: Mapping[str, Any]) -> bool:
        """Whether every pattern is found in its field."""
        for name, pattern in self.matches.items():
            value = record.get(name)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if value is None or not re.search(pattern, text):
                return False
        return True

    def allow_text(self, text: str) -> bool:
        return _within(len(text), self.min_characters, self.max_characters)

    def allow_tokens(self, tokens: int) -> bool:
        return _within(tokens, self.min_tokens, self.max_tokens)


def _within(size: int, low: int | None, high: int | None) -> bool:
    return (low is None or size >= low) and (high is None or size <= high)


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
    """Some files, or the `piece` of a file or dataset, in its kind's own terms."""

    paths: tuple[Path, ...] = ()
    piece: Any = None


@dataclass(frozen=True)
class BadRecord:
    """A record that is no document: what is wrong, and where."""

    fault: str


@dataclass(frozen=True)
class Conversation:
    """A document of messages, and where it is in its source."""

    messages: Messages
    place: Callable[[], str]


# A text, a conversation, or None for a document that a pattern leaves out.
Document: TypeAlias = str | Conversation | BadRecord | None


@dataclass(frozen=True)
class Kind:
    """A kind of source; `about` describes it in the recipe's reference.

    `read` yields the texts of a part; or, where there is a `place`, records with a number each, and
    `place` says where the record of a number is. Without `parts` it generates documents without
    end, and a piece is (seed, number, sequence length). `find` finds its files; by default those of
    a folder that end with one of `suffixes`. `identity` names the files whose content identifies
    the documents; by default all. `is_dataset`: it has subsets and splits.
    """

    about: str
    read: Callable[[Part, Source], Iterable[Any]]
    parts: Callable[[Source], Iterable[Part]] | None = None
    place: Callable[[Part, Source, int], str] | None = None
    suffixes: tuple[str, ...] = ("",)
    find: Callable[[str, str], list[Path]] | None = None
    identity_files: Callable[[list[Path]], list[Path]] | None = None
    needs_path: bool = True
    is_dataset: bool = False

    @property
    def has_fields(self) -> bool:
        return self.place is not None

    def is_remote(self, path: str) -> bool:
        """Whether the path is a name on the hub."""
        return self.is_dataset and not is_local(path)

    def files(self, where: str, path: str) -> list[Path]:
        """Its files, in order; raises UserError, with `where` as its path, if there are none."""
        return self.find(where, path) if self.find else files_of(where, path, self.suffixes)

    def identity(self, where: str, path: str) -> list[Path]:
        files = self.files(where, path)
        return self.identity_files(files) if self.identity_files else files


def list_parts(source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
    """The source's parts in a random order by `seed`; endless for a kind that generates them."""
    kind = KINDS[source.kind]
    if kind.parts is None:
        yield from (Part((), (seed, number, sequence_length)) for number in itertools.count())
        return
    parts = list(kind.parts(source))
    rng = importlib.import_module("numpy").random.default_rng([seed, 0])
    for index in rng.permutation(len(parts)):
        yield parts[index]


def read_part(part: Part, source: Source) -> Iterator[Document]:
    """The part's documents, empty ones included; None for a document that a pattern leaves out.

    Raises UserError, which names the source and the files, if they are damaged.
    """
    kind = KINDS[source.kind]
    try:
        if kind.place is None:
            yield from kind.read(part, source)
            return
        for number, record in kind.read(part, source):
            yield _document(record, source, partial(kind.place, part, source, number))
    except (UserError, RunError):
        raise
    except Exception as error:  # of a library that reads the files
        files = ", ".join(map(str, part.paths)) or source.path
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"source {source.name}: {files} cannot be read ({reason})") from error


def text_field(source: Source) -> str:
    """The field that holds the first record's text: `text` or, without one, its longest text."""
    kind = KINDS[source.kind]
    for part in kind.parts(source) if kind.has_fields and kind.parts is not None else ():
        for _, record in kind.read(part, source):
            if not isinstance(record, Mapping) or source.text_field in record:
                return source.text_field
            texts = {name: value for name, value in record.items() if isinstance(value, str)}
            is_chat = _messages(record, source.text_field) is not None
            longest = max(texts, key=lambda name: len(texts[name]), default=source.text_field)
            return source.text_field if is_chat else longest
    return source.text_field


def _document(record: Any, source: Source, place: Callable[[], str]) -> Document:
    """Filters come first; a record that passes them and has no text is a `BadRecord`."""
    name = source.text_field
    if isinstance(record, BadRecord):
        fault = record.fault
    elif not isinstance(record, Mapping):
        fault = f"expected an object, found {record!r:.80}"
    elif not source.filters.allow_record(record):
        return None
    elif source.loss == "all" and isinstance(text := record.get(name), str):
        return text
    elif (messages := _messages(record, name)) is not None:
        return Conversation(messages, place)
    elif source.loss == "completion":
        fault = "no messages, and no prompt with a completion, as `loss: completion` needs them"
    elif name not in record:
        fault = f"no field `{name}` (there is {', '.join(map(str, record)):.200}); set text_field"
    else:
        fault = f"field `{name}` is {record[name]!r:.80}, not text"
    return BadRecord(f"{place()}: {fault}")


def _messages(record: Mapping[str, Any], field: str) -> Messages | None:
    """The messages in `field` or `messages` of a record, or its `prompt` and `completion`."""
    for name in (field, "messages"):
        if isinstance(record.get(name), list):
            return record[name]
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        return None
    return [*_turns("user", prompt), *_turns("assistant", completion)]


def _turns(role: str, value: Any) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


KINDS: dict[str, Kind] = {
    name: kind
    for module in pkgutil.iter_modules(__path__)
    for name, kind in importlib.import_module(f"{__name__}.{module.name}").KINDS.items()
}

if TYPE_CHECKING:
    SourceKind = str
else:
    SourceKind = Literal[*KINDS]
