"""Where training documents come from, cut into parts that workers read on their own.

A part is a bounded piece of one source: some text files, a byte range of a JSONL file, a row group,
a shard. What a part yields depends on nothing but the part, so any number of workers gives the same
documents.
"""

from __future__ import annotations

import glob
import itertools
import logging
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bosch.errors import UserError
from data_prep import mds, records
from data_prep.essays import haystack_words, pydoc_topics
from data_prep.text import read_utf8

logger = logging.getLogger(__name__)

SourceKind = Literal["text", "jsonl", "parquet", "mds", "python_docs", "retrieval"]

_PART_BYTES = 4 * 2**20
_LIBRARY_PART_BYTES = 2**20
_RETRIEVAL_DOCUMENTS = 256
_SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
}
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


@dataclass(frozen=True)
class Part:
    """A piece of a source: `start` and `stop` are bytes, a row group, a shard, or seeds."""

    paths: tuple[str, ...]
    start: int = 0
    stop: int = 0
    characters: int = 0


def list_parts(source: Source, seed: int, sequence_length: int) -> Iterator[Part]:
    """The source's parts in the order they are read, drawn by `seed`; endless if synthetic.

    Raises:
        UserError: there is no file, or a file's header is damaged.
    """
    if source.kind == "retrieval":
        for index in itertools.count():
            state = np.random.SeedSequence([seed, index]).generate_state(2, np.uint32).tolist()
            longest = max(4000, 2 * sequence_length)
            yield Part((), start=state[0] << 32 | state[1], characters=longest)
    parts = _PARTS[source.kind](source)
    for index in np.random.default_rng([seed, 0]).permutation(len(parts)):
        yield parts[index]


def read_part(part: Part, source: Source) -> Iterator[str]:
    """The part's documents, empty ones included.

    Raises:
        UserError: a file is damaged; names the file and the byte, line, row or sample.
    """
    yield from _READERS[source.kind](part, source)


def _source_files(source: Source) -> list[Path]:
    """Files named by a path: the file, what a glob matches, or a folder's files of this kind."""
    assert source.path is not None
    where = f"source {source.name}: path {source.path}"
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    suffixes = _SUFFIXES.get(source.kind, ("",))
    if path.is_dir():
        candidates = (p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        files = sorted(p for p in candidates if p.name.endswith(suffixes))
        if not files:
            raise UserError(f"{where}: the folder holds no {' or '.join(suffixes) or 'file'}")
        return files
    if glob.has_magic(source.path):
        matches = glob.glob(str(path), recursive=True)
        files = sorted(Path(match) for match in matches if Path(match).is_file())
        if not files:
            raise UserError(f"{where}: no file matches; correct the pattern")
        return files
    raise UserError(f"{where}: no such file or folder")


def _hidden(path: Path, below: Path) -> bool:
    return any(name.startswith(".") for name in path.relative_to(below).parts)


def _grouped(files: Sequence[Path], part_bytes: int) -> list[Part]:
    """Files in order, small ones together."""
    parts: list[Part] = []
    group: list[str] = []
    size = 0
    for file in files:
        group.append(str(file))
        size += file.stat().st_size
        if size >= part_bytes:
            parts.append(Part(tuple(group)))
            group, size = [], 0
    return [*parts, Part(tuple(group))] if group else parts


def _text_parts(source: Source) -> list[Part]:
    return _grouped(_source_files(source), _PART_BYTES)


def _read_text(part: Part, source: Source) -> Iterator[str]:
    for path in part.paths:
        yield read_utf8(Path(path))


def _jsonl_parts(source: Source) -> list[Part]:
    parts = []
    for file in _source_files(source):
        size = 1 if records.is_compressed(file) else max(1, file.stat().st_size)
        starts = range(0, size, _PART_BYTES)
        parts += [Part((str(file),), at, min(at + _PART_BYTES, size)) for at in starts]
    return parts


def _read_jsonl(part: Part, source: Source) -> Iterator[str]:
    return records.read_jsonl(Path(part.paths[0]), part.start, part.stop, source.text_field)


def _parquet_parts(source: Source) -> list[Part]:
    return [
        Part((str(file),), group)
        for file in _source_files(source)
        for group in range(records.parquet_row_groups(file, source.text_field))
    ]


def _read_parquet(part: Part, source: Source) -> Iterator[str]:
    return records.read_parquet(Path(part.paths[0]), part.start, source.text_field)


def _mds_folders(source: Source) -> list[Path]:
    assert source.path is not None
    path = Path(source.path).expanduser()
    folders = [Path(p) for p in sorted(glob.glob(str(path)))] if not path.exists() else [path]
    found = sorted(index.parent for folder in folders for index in folder.rglob("index.json"))
    # A parent folder may hold an index of its own, merged from those below it.
    return [f for f in found if not any(other in f.parents for other in found)]


def _mds_parts(source: Source) -> list[Part]:
    folders = _mds_folders(source)
    if not folders:
        raise UserError(f"source {source.name}: path {source.path}: no index.json of MDS shards")
    return [
        Part((str(folder),), number)
        for folder in folders
        for number in range(len(mds.read_index(folder)))
    ]


def _read_mds(part: Part, source: Source) -> Iterator[str]:
    from data_prep.tokenize import TokenizerSpec, load_tokenizer

    assert source.tokenizer is not None
    tokenizer = load_tokenizer(TokenizerSpec(source.tokenizer))
    return mds.read_documents(Path(part.paths[0]), part.start, tokenizer)


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


def _read_retrieval(part: Part, source: Source) -> Iterator[str]:
    from data_prep.retrieval import retrieval_documents

    documents = retrieval_documents(
        part.start, haystack_words(None), characters=(500, part.characters)
    )
    yield from itertools.islice(documents, _RETRIEVAL_DOCUMENTS)


_PARTS = {
    "text": _text_parts,
    "jsonl": _jsonl_parts,
    "parquet": _parquet_parts,
    "mds": _mds_parts,
    "python_docs": _python_parts,
}
_READERS = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "mds": _read_mds,
    "python_docs": _read_python,
    "retrieval": _read_retrieval,
}
