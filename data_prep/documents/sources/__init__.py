"""Sources of training documents.

A kind of source is an entry of `KINDS` in a file of this folder. The file imports numpy and pyarrow
only when records are read, so that keys and checks of recipes are fast.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from bosch.errors import RunError, UserError
from bosch.files import check_hub_cache
from data_prep.source_files import files_of, is_local

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Filters:
    """Conditions on documents. Bounds are inclusive; tokens exclude the end-of-text token.

    `matches` maps fields to regular expressions, which are searched in their values. A missing or
    null field matches nothing. Booleans are written true or false, other values as in Python.
    """

    min_characters: int = 0
    max_characters: float = math.inf
    min_tokens: int = 0
    max_tokens: float = math.inf
    matches: Mapping[str, str] = field(default_factory=dict)

    def allow_record(self, record: Mapping[str, Any]) -> bool:
        """Whether every pattern is found in its field."""
        for name, pattern in self.matches.items():
            value = record.get(name)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if value is None or not re.search(pattern, text):
                return False
        return True


@dataclass(frozen=True)
class Source:
    """A source of documents, with the fields of the recipe's `prepare.sources`.

    `seed` orders its parts; synthetic documents also depend on `sequence_length`.
    """

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
    filters: Filters = field(default_factory=Filters)
    seed: int = 0
    sequence_length: int = 4096

    @property
    def files(self) -> list[Path]:
        """Its files; raises UserError if there are none."""
        assert self.path is not None
        return KINDS[self.kind].files(f"source {self.name}", self.path)


class Conversation(NamedTuple):
    """A document of messages, and its place."""

    messages: Messages
    place: str


class Tokens(NamedTuple):
    """A document as tokens of another model."""

    ids: Any  # [tokens]
    tokenizer: str
    place: str


# A text, other forms of a document, or None for one that a pattern leaves out.
Document: TypeAlias = str | Conversation | Tokens | None


@dataclass(frozen=True)
class Kind:
    """A kind of source; `about` describes it in the recipe's reference.

    `parts` are what is read in random order, by default files, and `read` yields the place and the
    content of each record of a part: a text or tokens, or fields by name if it `has_fields`. `find`
    finds its files; by default those of a folder that end with one of `suffixes`. `identity_files`
    are those whose content identifies the documents; by default all. `is_dataset`: it has subsets
    and splits.
    """

    about: str
    read: Callable[[Any, Source], Iterable[tuple[str, Any]]]
    parts: Callable[[Source], Iterable[Any]] = lambda source: source.files
    suffixes: tuple[str, ...] = ("",)
    find: Callable[[str, str], list[Path]] | None = None
    identity_files: Callable[[list[Path]], list[Path]] = lambda files: files
    has_fields: bool = False
    needs_path: bool = True
    is_dataset: bool = False

    def is_remote(self, path: str) -> bool:
        """Whether the path is a name on the hub."""
        return self.is_dataset and not is_local(path)

    def files(self, where: str, path: str) -> list[Path]:
        """Its files, in order; raises UserError, with `where` as its path, if there are none."""
        return self.find(where, path) if self.find else files_of(where, path, self.suffixes)


def documents(source: Source) -> Iterator[Document]:
    """The source's documents, part by part in a random order; empty ones are included.

    Raises UserError, which names the file and the record, if one is damaged or has no text.
    """
    return (_document(record, source, place) for place, record in _records(source))


def _records(source: Source) -> Iterator[tuple[str, Any]]:
    kind = KINDS[source.kind]
    what: Any = source.path
    try:
        parts = list(kind.parts(source))
        random.Random(source.seed).shuffle(parts)
        for part in parts:
            what = part if isinstance(part, Path) else what
            yield from kind.read(part, source)
    except (UserError, RunError):
        raise
    except Exception as error:  # of a library that reads the files
        check_hub_cache(error)
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__:
            raise RunError(
                f"source {source.name}: the hub cannot be reached ({reason}); run again"
            ) from None
        raise UserError(f"source {source.name}: {what} cannot be read ({reason})") from error


def text_field(source: Source) -> str:
    """The field that holds the first record's text: `text` or, without one, its longest text."""
    field, (_, record) = source.text_field, next(_records(source), ("", None))
    if not isinstance(record, Mapping) or field in record or _messages(record, field) is not None:
        return field
    texts = {name: value for name, value in record.items() if isinstance(value, str)}
    return max(texts, key=lambda name: len(texts[name]), default=field)


def _document(record: Any, source: Source, place: str) -> Document:
    """Filters come first: a record that they leave out needs no text."""
    name = source.text_field
    if isinstance(record, str | Tokens):
        return record
    if not isinstance(record, Mapping):
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
    raise UserError(f"{place}: {fault}")


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
