"""Sources of training documents, split into parts that workers read independently.

A part is a bounded piece of one source: some text files, a byte range of a JSONL file, a row group,
a shard. Its documents depend on the part alone, so any number of workers gives the same documents.
"""

from __future__ import annotations

import itertools
import logging
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from data_prep.documents import mds, records
from data_prep.documents.mds_index import Shard, read_index
from data_prep.documents.records import Filters
from data_prep.documents.retrieval import retrieval_documents
from data_prep.documents.source_files import SourceKind, source_files
from data_prep.documents.tokenizer import WINDOW, TokenizerSpec, load_tokenizer
from data_prep.text import Document, TextFile, haystack_words, pydoc_topics, read_utf8

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
_LIBRARY_PART_BYTES = 2**20
_RETRIEVAL_DOCUMENTS = 256
# Tests are left out of many installations; files in odd encodings live there too.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One source of documents; the fields are those of the recipe's `prepare.sources`."""

    name: str
    kind: SourceKind
    path: str | None = None
    text_field: str = "text"
    tokenizer: str | None = None
    weight: float = 1.0
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    filters: Filters = field(default_factory=Filters)


@dataclass(frozen=True)
class Part:
    """A piece of a source: some files, or of one file or dataset what the other fields say.

    `start` is a byte (JSONL), a row group (Parquet) or a shard's number (Hugging Face); `stop` is
    the byte behind the part (JSONL); `shard` is one of an MDS folder. `retrieval` has no files, but
    a `seed` and the `most_characters` of a document.
    """

    paths: tuple[Path, ...] = ()
    start: int = 0
    stop: int = 0
    shard: Shard | None = None
    seed: int = 0
    most_characters: int = 0


def list_parts(source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
    """The source's parts in an order drawn from `seed`; endless for `retrieval`.

    Raises UserError when there is no file, or a file's header is damaged; RunError where the hub
    cannot be reached.
    """
    if source.kind == "retrieval":
        yield from _retrieval_parts(seed, sequence_length)
        return
    parts = _PARTS[source.kind](source)
    for index in np.random.default_rng([seed, 0]).permutation(len(parts)):
        yield parts[index]


def read_part(part: Part, source: Source) -> Iterator[Document | None]:
    """The part's documents, empty ones included; None for one that a pattern leaves out.

    Raises UserError when a file is damaged; names the file and the byte, line, row or sample.
    Raises RunError where the hub cannot be reached.
    """
    yield from _READERS[source.kind](part, source)


def _source_files(source: Source) -> list[Path]:
    assert source.path is not None
    return source_files(f"source {source.name}", source.kind, source.path)


def _grouped(files: Sequence[Path], part_bytes: int) -> list[Part]:
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


def _read_text(part: Part, source: Source) -> Iterator[Document]:
    # WINDOW counts characters; a file has no more of them than bytes.
    for path in part.paths:
        yield TextFile(path) if path.stat().st_size > WINDOW else read_utf8(path)


def _jsonl_parts(source: Source) -> list[Part]:
    parts = []
    for file in _source_files(source):
        # A compressed file is one part.
        size = 1 if records.is_compressed(file) else max(1, file.stat().st_size)
        starts = range(0, size, PART_BYTES)
        parts += [Part((file,), at, min(at + PART_BYTES, size)) for at in starts]
    return parts


def _parquet_parts(source: Source) -> list[Part]:
    return [
        Part((file,), group)
        for file in _source_files(source)
        for group in range(records.parquet_row_groups(file, source.text_field))
    ]


def _mds_parts(source: Source) -> list[Part]:
    parts = [
        Part((index.parent,), shard=shard)
        for index in _source_files(source)
        for shard in read_index(index)
    ]
    for part in parts:
        assert part.shard is not None
        part.shard.file(part.paths[0])  # raises where there is no such file
    return parts


def _read_mds(part: Part, source: Source) -> Iterator[str]:
    assert source.tokenizer is not None and part.shard is not None
    tokenizer = load_tokenizer(TokenizerSpec(source.tokenizer))
    return mds.read_documents(part.paths[0], part.shard, tokenizer)


def _read_huggingface(part: Part, source: Source) -> Iterator[str | None]:
    where = f"source {source.name}: dataset {source.path}, split {source.split}"
    name, filters = source.text_field, source.filters
    return records.read_dataset(where, _dataset(source), part.start, name, filters)


_open_dataset = lru_cache(maxsize=4)(records.open_dataset)


def _dataset(source: Source) -> Any:
    assert source.path is not None
    where = f"source {source.name}"
    return _open_dataset(where, source.path, source.subset, source.split, source.revision)


def _python_parts(source: Source) -> list[Part]:
    """The standard library's modules in the order of their names; pydoc's topics are one part."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in library.rglob("*.py")
        if not _NOT_LIBRARY.intersection(path.relative_to(library).parts[:-1])
    )
    if not files:
        raise UserError(f"source {source.name}: the standard library's source is not in {library}")
    return [*_grouped(files, _LIBRARY_PART_BYTES), Part(())]


def _read_python(part: Part, source: Source) -> Iterator[str]:
    if not part.paths:
        yield from pydoc_topics().values()
    for path in part.paths:
        try:
            with tokenize.open(path) as file:
                yield file.read()
        except (SyntaxError, UnicodeDecodeError):
            logger.warning("source %s: left out %s, which is not text", source.name, path)


def _retrieval_parts(seed: int, sequence_length: int) -> Iterator[Part]:
    longest = max(4000, 2 * sequence_length)
    for index in itertools.count():
        high, low = np.random.SeedSequence([seed, index]).generate_state(2, np.uint32).tolist()
        yield Part(seed=high << 32 | low, most_characters=longest)


def _read_retrieval(part: Part, source: Source) -> Iterator[str]:
    characters = 500, part.most_characters
    documents = retrieval_documents(part.seed, haystack_words(None), characters=characters)
    return itertools.islice(documents, _RETRIEVAL_DOCUMENTS)


_PARTS: dict[str, Callable[[Source], list[Part]]] = {
    "text": lambda source: _grouped(_source_files(source), PART_BYTES),
    "jsonl": _jsonl_parts,
    "parquet": _parquet_parts,
    "mds": _mds_parts,
    "huggingface": lambda source: [Part((), at) for at in range(_dataset(source).num_shards)],
    "python_docs": _python_parts,
}
_READERS: dict[str, Callable[[Part, Source], Iterator[Document | None]]] = {
    "text": _read_text,
    "jsonl": lambda part, source: records.read_jsonl(
        part.paths[0], part.start, part.stop, source.text_field, source.filters
    ),
    "parquet": lambda part, source: records.read_parquet(
        part.paths[0], part.start, source.text_field, source.filters
    ),
    "mds": _read_mds,
    "huggingface": _read_huggingface,
    "python_docs": _read_python,
    "retrieval": _read_retrieval,
}
