"""Reading text that may be damaged, with errors that say where."""

from __future__ import annotations

from pathlib import Path

from bosch.errors import UserError


def read_utf8(path: Path) -> str:
    """The file's text, without a byte order mark.

    Raises:
        UserError: the file cannot be read or is not UTF-8; names the file and the byte offset.
    """
    try:
        return decode_utf8(path.read_bytes(), f"{path}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def decode_utf8(data: bytes, where: str, offset: int = 0) -> str:
    """`data` as text; `where` and `offset` (of the first byte) are for the error message."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        position = offset + error.start
        raise UserError(
            f"{where}: not UTF-8 at byte {position} (0x{data[error.start]:02x}); "
            "convert the file to UTF-8 or leave it out"
        ) from None
