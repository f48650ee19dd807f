"""Files of documents and of tokenizers; imports nothing that is slow to load."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bosch.errors import UserError
from bosch.files import read_json


def compressible(*suffixes: str) -> tuple[str, ...]:
    """Suffixes of plain and of compressed files."""
    return tuple(suffix + end for suffix in suffixes for end in ("", ".gz", ".bz2", ".xz", ".zst"))


def open_plain(path: Path) -> BinaryIO:
    """Open a file, decompressed as its suffix says."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    register_zstd()
    return compr[infer_compression(str(path))](path.open("rb"), mode="rb")


def register_zstd() -> None:
    """Let fsspec open .zst, for which it needs another package."""
    import pyarrow as pa
    from fsspec.compression import compr, register_compression

    def opened(file: Any, mode: str = "rb", **_: Any) -> io.BufferedReader:
        return io.BufferedReader(pa.input_stream(file, compression="zstd"))  # type: ignore[arg-type]

    if "zstd" not in compr:
        register_compression("zstd", opened, "zst")


def files_of(where: str, pattern: str, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Files named by `pattern` (a file, a folder with all below it, or a glob of both), in order.

    In a folder only files that end with one of `suffixes` and are not hidden count. Raises
    UserError when there is no such file, with `where` as its path.
    """
    path = Path(pattern).expanduser()
    matches = [path] if path.exists() else [*map(Path, glob.glob(str(path), recursive=True))]
    files = {match for match in matches if match.is_file()}
    for folder in filter(Path.is_dir, matches):
        files |= {file for file in files_below(folder) if file.name.endswith(suffixes)}
    if not matches:
        raise UserError(f"{pattern} names no file; expected a file, a folder or a glob", where)
    if not files:
        plain = [suffix for suffix in suffixes if suffix.count(".") == 1]
        raise UserError(f"the folder {pattern} holds no {' or '.join(plain) or 'file'}", where)
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
