"""The index of a folder of MosaicML's MDS shards: files, sizes, hashes and columns."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bosch.errors import UserError
from bosch.files import load_json

INDEX = "index.json"
# Columns of token ids, as llm-foundry and others name them.
_TOKENS = ("input_ids", "tokens")
_TEXT = "text"  # the default of text_field

# Offsets in a shard are 32-bit.
_Size = Annotated[int, Field(ge=0, lt=2**32)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ShardFile(_Model):
    """A file of a shard, plain or compressed."""

    basename: str
    size: _Size = Field(alias="bytes")
    hashes: dict[str, str] = {}

    def check(self, data: Any, path: Path) -> None:
        """Raise UserError unless `data`, read from `path`, has the stated size and hashes."""
        if len(data) != self.size:
            raise UserError(
                f"{path}: has {len(data):,} bytes where {INDEX} states {self.size:,}; get it again"
            )
        for name, stated in self.hashes.items():
            if _digest(name, data, path) != stated.lower():
                raise UserError(
                    f"{path}: its {name} is not the one that {INDEX} states; get it again"
                )


class Shard(_Model):
    """A shard and the encodings of its columns; `column_sizes` is None for variable sizes."""

    version: Literal[2]
    format: Literal["mds"]
    raw_data: ShardFile
    zip_data: ShardFile | None
    compression: str | None
    samples: _Size
    column_names: list[str] = Field(min_length=1)
    column_encodings: list[str]
    column_sizes: list[_Size | None]

    def file(self, folder: Path) -> tuple[Path, bool]:
        """The shard's file in the index's folder, and whether it is compressed.

        Raises UserError if the shard has no file.
        """
        for entry in filter(None, (self.raw_data, self.zip_data)):
            path = folder / entry.basename
            if path.is_file():
                return path, entry is not self.raw_data
        raise UserError(f"{path}: this shard is in {INDEX} but not in the folder; get it again")

    def document_column(self, where: str, text_field: str) -> str:
        """The column with the documents: `text_field`, by default also a column of tokens.

        Raises UserError if there is none.
        """
        for name in (text_field, *(_TOKENS if text_field == _TEXT else ())):
            if name in self.column_names:
                return name
        names = ", ".join(self.column_names)[:200]
        raise UserError(f"{where}: no column `{text_field}` (there is {names}); set text_field")

    def is_text(self, column: str) -> bool:
        """Whether a column holds texts rather than tokens."""
        return self.column_encodings[self.column_names.index(column)] == "str"


def read_index(path: Path) -> list[Shard]:
    """The shards of an index, in order.

    Raises UserError, with the place, if the file is missing, damaged or of an unknown version, or
    names a file outside its folder.
    """
    try:
        content = load_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _index_error(path, " ".join(str(error).split())) from None
    entries = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise _index_error(path, "expected an object with a list `shards`")
    return [_shard(path, number, entry) for number, entry in enumerate(entries)]


def _shard(path: Path, number: int, entry: Any) -> Shard:
    try:
        shard = Shard.model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, ("shards", number, *fault["loc"])))
        raise _index_error(path, f"{field}: {fault['msg']}") from None
    if reason := _fault(shard):
        raise UserError(f"{path}: shards.{number}: {reason}")
    return shard


def _index_error(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: not an index of MDS shards, version 2 ({reason})")


def _fault(shard: Shard) -> str | None:
    columns = len(shard.column_names)
    if not columns == len(shard.column_encodings) == len(shard.column_sizes):
        return "column_names, column_encodings and column_sizes have different lengths"
    for entry in filter(None, (shard.raw_data, shard.zip_data)):
        name = PurePosixPath(entry.basename)
        if name.is_absolute() or ".." in name.parts or not name.name:
            return f"the file name {entry.basename!r:.100} leads out of the folder"
    if shard.zip_data is not None and (shard.compression or "").split(":")[0] != "zstd":
        return f"compressed with {shard.compression or 'nothing'!r:.100}; only zstd can be read"
    return None


def _digest(name: str, data: Any, path: Path) -> str:
    import xxhash

    try:
        if name in xxhash.algorithms_available:
            return str(getattr(xxhash, name)(data).hexdigest())
        return hashlib.new(name, data, usedforsecurity=False).hexdigest()
    except (ValueError, TypeError):
        raise UserError(f"{path}: {INDEX} states an unknown kind of hash, {name!r:.100}") from None
