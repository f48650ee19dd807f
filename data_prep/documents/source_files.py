"""Files of documents and of tokenizers; imports nothing heavy, for keys and checks."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from bosch.errors import UserError
from bosch.files import NOT_REGULAR, open_regular
from bosch.model.untrusted import TOKENIZER_TEXTS, VOCABULARIES
from data_prep.documents.mds_index import INDEX, read_index

SourceKind = Literal["text", "jsonl", "parquet", "mds", "huggingface", "python_docs", "retrieval"]

_PARQUET_MAGIC = b"PAR1"
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
}


def source_files(where: str, kind: str, pattern: str) -> list[Path]:
    """Files named by `pattern`, a path, a folder (with all below it) or a glob, in order.

    Of a folder only the files of this kind count, and no hidden ones. A source of kind mds gives
    its indices: where a folder holds an index merged from those below it, that one alone.

    Raises UserError when there is no such file; `where` stands before the message.
    """
    path = Path(pattern).expanduser()
    if kind == "mds":
        return _indices(where, path, pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = SUFFIXES.get(kind, ("",))
        files = sorted(file for file in files_below(path) if file.name.endswith(suffixes))
        if not files:
            expected = " or ".join(suffixes) if kind in SUFFIXES else "file"
            raise UserError(f"{where}: the folder {pattern} holds no {expected}")
        return files
    matches = map(Path, glob.glob(str(path), recursive=True))
    files = sorted(match for match in matches if not match.is_dir())
    for file in files:
        _require_file(file)
    if not files:
        raise UserError(f"{where}: {pattern} names no file; expected a file, a folder or a glob")
    return files


def is_local(path: str) -> bool:
    """Whether a Hugging Face dataset is a directory, rather than a name on the hub."""
    return Path(path).expanduser().is_dir()


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, in no order; hidden files and folders are left out.

    Raises UserError for what cannot be read: a link that leads nowhere, a pipe, socket or device.
    """
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(directory, name)
            if name.startswith("."):
                continue
            _require_file(path)
            yield path


def _require_file(path: Path) -> None:
    if not path.exists():
        raise UserError(f"{path} is a link that leads nowhere; remove it")
    if not path.is_file():
        raise UserError(f"{path} {NOT_REGULAR}; remove it")


def _indices(where: str, path: Path, pattern: str) -> list[Path]:
    roots = [path] if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    indices = {file for root in roots for file in files_below(root) if file.name == INDEX}
    if not indices:
        raise UserError(f"{where}: there is no {INDEX} below {pattern}; expected MDS shards")
    folders = {index.parent for index in indices}
    return sorted(index for index in indices if not folders.intersection(index.parent.parents))


def check_source(where: str, kind: str, pattern: str) -> None:
    """Raise UserError when a source names no file, only empty files, or damaged ones.

    Of a Parquet file the ends are read, of MDS shards the index.
    """
    files = source_files(where, kind, pattern)
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{where}: the corpus at {pattern} is empty")
    for file in files:
        if kind == "parquet":
            _check_parquet(where, file)
        elif kind == "mds":
            read_index(file)


def _check_parquet(where: str, file: Path) -> None:
    size = file.stat().st_size
    with open_regular(file) as stream:
        start = stream.read(4)
        stream.seek(max(size - 8, 0))
        tail = stream.read(8)
    if size < 12 or start != _PARQUET_MAGIC or tail[4:] != _PARQUET_MAGIC:
        raise UserError(f"{where}: {file} is no whole Parquet file (cut short or of another kind)")
    if int.from_bytes(tail[:4], "little") > size - 12:
        raise UserError(f"{where}: {file} is a damaged Parquet file (its footer does not fit)")


# Files of a model directory that its tokenizer is made of.
_TOKENIZER_PATTERNS = (
    *VOCABULARIES,
    *TOKENIZER_TEXTS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "chat_template.json",
    "tokenization_*.py",
)


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the files in a directory that a tokenizer is read from, in order."""
    paths = (path for pattern in _TOKENIZER_PATTERNS for path in directory.glob(pattern))
    files = {path for path in paths if path.is_file() and not path.name.startswith(".")}
    return sorted(path.relative_to(directory).as_posix() for path in files)
