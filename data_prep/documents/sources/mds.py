"""MDS shards of MosaicML's streaming datasets, with texts or with tokens of another model.

A shard, plain or zstd-compressed, holds, little-endian: the number of samples n (uint32), n + 1
offsets from the file's start (uint32), the writer's settings, the samples. A sample holds the sizes
(uint32) of its columns of variable size, then the columns' bytes in the index's order.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from bosch.errors import UserError
from data_prep.documents.sources import Kind, Source, Tokens
from data_prep.source_files import files_of

INDEX = "index.json"
# Columns of token ids, as llm-foundry and others name them, where there is no column `text`.
_TOKENS = ("input_ids", "tokens")
_SPANS = "indices"
_KINDS = ("uint", "int", "float")


class ShardFile(BaseModel):
    """A file of a shard, plain or compressed."""

    basename: str
    size: int = Field(alias="bytes")
    hashes: dict[str, str] = {}

    def check(self, path: Path, data: Any) -> None:
        """Raise UserError unless `data`, read from `path`, has the stated size and hashes."""
        if len(data) != self.size:
            raise UserError(
                f"{path}: has {len(data):,} bytes where {INDEX} states {self.size:,}; get it again"
            )
        for name, digest in self.hashes.items():
            module: Any = importlib.import_module("xxhash") if name.startswith("xx") else hashlib
            if getattr(module, name)(data).hexdigest() != digest.lower():
                raise UserError(f"{path}: its {name} is not {INDEX}'s; get it again")


class Shard(BaseModel):
    """A shard and the encodings of its columns; `column_sizes` is None for variable sizes."""

    version: Literal[2]
    format: Literal["mds"]
    raw_data: ShardFile
    zip_data: ShardFile | None
    samples: int
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]

    def file(self, folder: Path) -> tuple[Path, ShardFile]:
        """The shard's file in the index's folder, and what the index says of it."""
        for entry in filter(None, (self.raw_data, self.zip_data)):
            path = folder / entry.basename
            if path.is_file():
                return path, entry
        raise UserError(f"{path}: this shard is in {INDEX} but not in the folder; get it again")

    def is_text(self, column: str) -> bool:
        """Whether a column holds texts rather than tokens."""
        return self.column_encodings[self.column_names.index(column)] == "str"


class _Index(BaseModel):
    shards: list[Shard]


def read_index(path: Path) -> list[Shard]:
    """The shards of an index, in order; raises UserError if it is none of version 2."""
    try:
        return _Index.model_validate_json(path.read_bytes()).shards
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise UserError(f"{path}: not an index of MDS shards, version 2 ({reason})") from None


def read_samples(folder: Path, shard: Shard, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The shard's samples as dictionaries of those of `columns` that it has.

    Raises UserError, with the file, if its size or hash is not that of the index.
    """
    import numpy as np
    import pyarrow as pa

    path, entry = shard.file(folder)
    data: Any = path.read_bytes()
    entry.check(path, data)
    if entry is not shard.raw_data:
        data = pa.decompress(data, decompressed_size=shard.raw_data.size, codec="zstd")
        shard.raw_data.check(path, data)
    data = memoryview(data)
    offsets = np.frombuffer(data, "<u4", shard.samples + 1, offset=4).tolist()
    variable = shard.column_sizes.count(None)
    names = list(zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True))
    for begin, end in itertools.pairwise(offsets):
        sizes = iter(np.frombuffer(data, "<u4", variable, offset=begin).tolist())
        sample, at = {}, begin + 4 * variable
        for name, encoding, fixed in names:
            size = next(sizes) if fixed is None else fixed
            if name in columns:
                sample[name] = _decode(encoding, data[at : at + size])
            at += size
        if at != end:
            raise UserError(f"{path}: a sample has {end - begin:,} bytes, its columns others")
        yield sample


def _decode(encoding: str, data: memoryview) -> Any:
    """A value; dtype and shape of an array precede its data if the encoding does not fix them."""
    import numpy as np

    kind, *fixed = encoding.split(":")
    match kind:
        case "str":
            return bytes(data).decode()
        case "json":
            return json.loads(bytes(data))
        case "bytes":  # llm-foundry before 0.8
            return np.frombuffer(data, "<i8")
        case "ndarray":
            # Without a fixed type, the first byte has its bits and its kind.
            dtype = fixed[0] if fixed else f"{_KINDS[data[0] % 8]}{data[0] // 8 * 8}"
            if len(fixed) > 1:
                shape = [int(size) for size in fixed[1].split(",")]
                return np.frombuffer(data, dtype).reshape(shape)
            data = data if fixed else data[1:]
            dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
            end = 1 + dimensions * width
            shape = np.frombuffer(data[1:end], f"<u{width}").tolist()
            return np.frombuffer(data[end:], dtype).reshape(shape)
    raise ValueError(f"a column of tokens is encoded as {encoding}; write it as json or ndarray")


def _indices(where: str, path: str) -> list[Path]:
    """The index files; only the merged index if a folder has one."""
    indices = {file for file in files_of(where, path, (INDEX,)) if file.name == INDEX}
    folders = {index.parent for index in indices}
    return sorted(index for index in indices if not folders.intersection(index.parent.parents))


def _identity(indices: list[Path]) -> list[Path]:
    """The index files (their hashes are verified while reading) and shards without hashes."""
    shards = ((index.parent, shard) for index in indices for shard in read_index(index))
    return indices + [
        shard.file(folder)[0] for folder, shard in shards if not shard.raw_data.hashes
    ]


def _shards(source: Source) -> Iterator[tuple[Path, Shard, str]]:
    """Folders, shards and their columns of documents, of which the files are there."""
    accepted = (source.text_field, *(_TOKENS if source.text_field == "text" else ()))
    for index in source.files:
        for shard in read_index(index):
            shard.file(index.parent)
            column = next((name for name in accepted if name in shard.column_names), None)
            where = f"source {source.name}: {index}"
            if column is None:
                names = ", ".join(shard.column_names)[:200]
                raise UserError(
                    f"{where}: no column `{source.text_field}` (there is {names}); set text_field"
                )
            if source.tokenizer is None and not shard.is_text(column):
                raise UserError(
                    f"{where}: column `{column}` holds tokens; name their tokenizer as `tokenizer`"
                )
            yield index.parent, shard, column


def _documents(part: tuple[Path, Shard, str], source: Source) -> Iterator[tuple[str, Any]]:
    """Texts, or tokens: those of a packed record (`indices`, pairs of start and end) one by one."""
    import numpy as np

    folder, shard, column = part
    for row, sample in enumerate(read_samples(folder, shard, [column, _SPANS])):
        where, content = f"{shard.file(folder)[0]}, sample {row}", sample[column]
        if source.tokenizer is None or shard.is_text(column):
            yield where, content
            continue
        ids = np.asarray(content)
        if (ids.dtype.kind not in "iu" and ids.size) or ids.ndim != 1:
            raise UserError(f"{where}: {column} is no list of token ids")
        for begin, end in sample.get(_SPANS, [(0, len(ids))]):
            if not 0 <= begin <= end <= len(ids):
                raise UserError(f"{where}: {_SPANS} has a span outside the record")
            yield where, Tokens(ids[begin:end], source.tokenizer, where)


KINDS = {
    "mds": Kind(
        "MDS shards below `path`", _documents, _shards, find=_indices, identity_files=_identity
    )
}
