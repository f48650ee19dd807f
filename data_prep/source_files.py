"""Files of documents and of tokenizers; imports nothing that is slow to load."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bosch.errors import UserError
from bosch.files import read_json

_SUFFIXES = ("", ".gz", ".bz2", ".xz", ".zst")
# The first bytes of a compressed file.
_OPENERS: dict[bytes, Any] = {
    rb"\x1f\x8b": gzip.open, rb"BZh[1-9]1AY&SY": bz2.open, rb"\xfd7zXZ\0": lzma.open,
    rb"\x28\xb5\x2f\xfd": None,
}  # fmt: skip


def compressible(*suffixes: str) -> tuple[str, ...]:
    """Suffixes of plain and of compressed files."""
    return tuple(suffix + end for suffix in suffixes for end in _SUFFIXES)


def _compression(path: Path) -> bytes | None:
    with open(path, "rb") as file:
        start = file.read(10)
    return next((mark for mark in _OPENERS if re.match(mark, start)), None)


def is_compressed(path: Path) -> bool:
    return _compression(path) is not None


def open_plain(path: Path) -> BinaryIO:
    """Open a file, decompressed as its first bytes say."""
    compression = _compression(path)
    if compression is None:
        return path.open("rb")
    if _OPENERS[compression]:
        return _OPENERS[compression](path)
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # type: ignore[return-value]


def files_of(where: str, pattern: str, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Files named by `pattern` (a file, a folder with all below it, or a glob), in order.

    In a folder only files that end with one of `suffixes` and are not hidden count. Raises
    UserError when there is no such file, with `where` as its path.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = [file for file in files_below(path) if file.name.endswith(suffixes)]
        if not files:
            plain = [suffix for suffix in suffixes if suffix.count(".") == 1]
            expected = " or ".join(plain) or "file"
            raise UserError(f"the folder {pattern} holds no {expected}", where)
    else:
        matches = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if not files:
            raise UserError(f"{pattern} names no file; expected a file, a folder or a glob", where)
    return sorted(files)


def is_local(path: str) -> bool:
    """Whether a Hugging Face dataset is a directory, rather than a name on the hub."""
    return Path(path).expanduser().is_dir()


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, links followed, hidden ones left out, in no particular order.

    Raises OSError for a folder that cannot be listed, and UserError for a broken link.
    """
    for directory, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(directory, name) for name in names if not name.startswith(".")):
            if path.is_file():
                yield path
            elif path.is_symlink():
                raise UserError(f"{path} is a link that leads nowhere; remove it")


def _refuse(error: OSError) -> NoReturn:
    raise error


# Files of a model directory from which its tokenizer is read.
_TOKENIZER_PATTERNS = (
    "tokenizer.json", "vocab.json", "tekken.json", "vocab-src.json", "vocab-tgt.json",
    "emoji.json", "entity_vocab.json", "byte_maps.json", "word_shape.json",
    "word_pronunciation.json", "*.model", "*.spm", "*.tiktoken", "*.jinja",
    "additional_chat_templates/*.jinja", "merges.txt", "vocab.txt", "vocab.bpe", "bpe.codes",
    "prophetnet.tokenizer", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "normalizer.json", "chat_template.json", "tokenization_*.py",
)  # fmt: skip


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the tokenizer's files in a directory, in order."""
    paths = (path for pattern in _TOKENIZER_PATTERNS for path in directory.glob(pattern))
    files = {path for path in paths if path.is_file() and not path.name.startswith(".")}
    return sorted(path.relative_to(directory).as_posix() for path in files)


def class_of_config(directory: Path) -> dict[str, Any]:
    """config.json's fields of the tokenizer's class; empty if tokenizer_config.json names one."""
    config, tokenizer_config = (
        read_json(directory / f"{name}config.json") for name in ("", "tokenizer_")
    )
    has_class = isinstance(tokenizer_config, dict) and tokenizer_config.get("tokenizer_class")
    if not isinstance(config, dict) or has_class:
        return {}
    names = ("model_type", "tokenizer_class", "auto_map")
    return {name: config[name] for name in names if config.get(name)}
