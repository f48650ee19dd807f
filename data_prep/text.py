"""Read text files, large ones in pieces; errors name the file and the byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bosch.errors import UserError
from bosch.files import open_regular


def read_utf8(path: Path) -> str:
    """The file's text, without a byte order mark.

    Raises:
        UserError: the file cannot be read or is not UTF-8; names the file and the byte offset.
    """
    try:
        with open_regular(path) as file:
            return decode_utf8(file.read(), f"{path}")
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


@dataclass(frozen=True)
class TextFile:
    """A document that is a whole file, too large to be held as one string."""

    path: Path

    def pieces(self) -> Iterator[str]:
        """The file's text, without a byte order mark, in pieces of bounded size.

        Raises:
            UserError: as `read_utf8` does.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        done = 0
        try:
            with open_regular(self.path) as file:
                while block := file.read(_PIECE_BYTES):
                    pending = len(decoder.getstate()[0])
                    yield _decode(decoder, block, self.path, done - pending)
                    done += len(block)
            pending = len(decoder.getstate()[0])
            yield _decode(decoder, b"", self.path, done - pending, final=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error


_PIECE_BYTES = 2**17


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, path: Path, at: int, final: bool = False
) -> str:
    """The next piece of text; byte `at` of the file is the first that is not yet decoded."""
    pending = decoder.getstate()[0]
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError:
        return decode_utf8(pending + block, f"{path}", at)


# One text: a string, or a file that is read in pieces.
Document = str | TextFile
