"""Files of documents, plain or compressed: their content decides, not their names."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from bosch.errors import UserError
from bosch.files import open_regular

# What is raised while a damaged file is read.
READ_FAULTS = (OSError, EOFError, lzma.LZMAError, zlib.error)
_SUFFIXES = ("", ".gz", ".bz2", ".xz", ".zst")
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_ZSTD, _ZSTD_SKIPPABLE = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"


def compressible(*suffixes: str) -> tuple[str, ...]:
    """Suffixes of plain and of compressed files."""
    return tuple(suffix + compression for suffix in suffixes for compression in _SUFFIXES)


def is_compressed(path: Path) -> bool:
    """Raises OSError if the file cannot be read."""
    return _opener(path) is not None


def open_plain(path: Path) -> BinaryIO:
    """Open a file, decompressed; while it is read it may raise `READ_FAULTS`."""
    opener = _opener(path)
    return open_regular(path) if opener is None else opener(path)


def _opener(path: Path) -> Any:
    with open_regular(path) as file:
        start = file.read(6)
    if start.startswith(_ZSTD) or (start[1:4] == _ZSTD_SKIPPABLE and start[0] >> 4 == 5):
        return _open_zstd
    return next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)


def _open_zstd(path: Path) -> BinaryIO:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # type: ignore[return-value]


LARGE_WINDOW = "its zstd window is larger than 128 MB; decompress it with zstd -d --long=31"


def has_large_window(reason: str) -> bool:
    """Whether a message of Arrow says that a zstd frame has a window that it does not decode."""
    return "too much memory" in reason


def read_fault(path: Path, error: BaseException) -> UserError:
    """The error to raise for one of `READ_FAULTS`."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    if has_large_window(reason):
        return UserError(f"{path}: {LARGE_WINDOW}")
    return UserError(f"{path}: cannot be read to its end ({reason}); get it again")
