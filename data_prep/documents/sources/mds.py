"""MDS shards of MosaicML's streaming datasets, with texts or with tokens of another model.

A shard, plain or zstd-compressed, holds, little-endian: the number of samples n (uint32), n + 1
offsets from the file's start (uint32), the writer's settings, the samples. A sample holds the sizes
(uint32) of its columns of variable size, then the columns' bytes in the index's order.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bosch.errors import UserError
from data_prep.documents.sources import Kind, Part, Source
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.source_files import files_below

INDEX = "index.json"
# Columns of token ids, as llm-foundry and others name them, where there is no column `text`.
_TOKENS = ("input_ids", "tokens")
_SPANS = "indices"
# Array dtypes by their code, the first byte of an array without a fixed dtype.
_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class ShardFile(_Model):
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
    samples: int
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]

    def file(self, folder: Path) -> tuple[Path, ShardFile]:
        """The shard's file in the index's folder, and what the index says of it.

        Raises UserError if the shard has no file, or one that is compressed other than by zstd.
        """
        for entry in filter(None, (self.raw_data, self.zip_data)):
            path = folder / entry.basename
            if path.is_file():
                if entry is self.zip_data and not (self.compression or "").startswith("zstd"):
                    raise UserError(f"{path}: compressed with {self.compression}, not with zstd")
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
    stored = path.read_bytes()
    entry.check(path, stored)
    data = memoryview(stored)
    if entry is not shard.raw_data:
        plain = pa.decompress(stored, decompressed_size=shard.raw_data.size, codec="zstd")
        if not entry.hashes:
            shard.raw_data.check(path, plain)
        data = memoryview(plain)
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
            dtype = fixed[0] if fixed else _TYPES[data[0]]
            if len(fixed) > 1:
                shape = [int(size) for size in fixed[1].split(",")]
                return np.frombuffer(data, dtype).reshape(shape)
            data = data if fixed else data[1:]
            dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
            end = 1 + dimensions * width
            shape = np.frombuffer(data[1:end], f"<u{width}").tolist()
            return np.frombuffer(data[end:], dtype).reshape(shape)
    raise ValueError(f"a column of tokens is encoded as {encoding}; write it as json or ndarray")


def read_tokens(folder: Path, shard: Shard, column: str, tokenizer: Any) -> Iterator[str]:
    """Texts of the shard's documents, decoded from a column of token ids by their own tokenizer.

    A packed record (with `indices`, pairs of start and end) gives one text per document. Raises
    UserError if the shard is damaged, or has tokens that this tokenizer does not know.
    """
    import numpy as np

    for row, sample in enumerate(read_samples(folder, shard, [column, _SPANS])):
        where = f"{shard.file(folder)[0]}, sample {row}"
        ids = np.asarray(sample[column])
        if (ids.dtype.kind not in "iu" and ids.size) or ids.ndim != 1:
            raise UserError(f"{where}: {column} is no list of token ids")
        for token in (int(ids.min()), int(ids.max())) if ids.size else ():
            if not 0 <= token < len(tokenizer):
                raise UserError(
                    f"{where}: token {token} is not in the vocabulary of {tokenizer.name_or_path}; "
                    "name the tokenizer the shards were written with"
                )
        for begin, end in sample.get(_SPANS, [(0, len(ids))]):
            if not 0 <= begin <= end <= len(ids):
                raise UserError(f"{where}: {_SPANS} has a span outside the record")
            yield tokenizer.decode(
                ids[begin:end].tolist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )


def _indices(where: str, path: str) -> list[Path]:
    """The index files; only the merged index if a folder has one."""
    root = Path(path).expanduser()
    roots = [root] if root.is_dir() else map(Path, glob.glob(str(root), recursive=True))
    indices = {file for folder in roots for file in files_below(folder) if file.name == INDEX}
    if not indices:
        raise UserError(f"there is no {INDEX} below {path}; expected MDS shards", where)
    folders = {index.parent for index in indices}
    return sorted(index for index in indices if not folders.intersection(index.parent.parents))


def _identity(indices: list[Path]) -> list[Path]:
    """The index files (their hashes are verified while reading) and shards without hashes."""
    shards = ((index.parent, shard) for index in indices for shard in read_index(index))
    return indices + [
        shard.file(folder)[0] for folder, shard in shards if not shard.raw_data.hashes
    ]


def _shards(source: Source) -> Iterator[Part]:
    """Parts with a shard and its column of documents, of which the files are there."""
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
                    f"source {source.name}: column `{column}` of {index} holds tokens; name "
                    "their tokenizer as `tokenizer`"
                )
            yield Part((index.parent,), (shard, column))


def _documents(part: Part, source: Source) -> Iterator[str]:
    [folder], (shard, column) = part.paths, part.piece
    if shard.is_text(column):
        return (sample[column] for sample in read_samples(folder, shard, [column]))
    assert source.tokenizer is not None
    tokenizer = load_tokenizer(TokenizerSpec(source.tokenizer))
    return read_tokens(folder, shard, column, tokenizer)


KINDS = {
    "mds": Kind(
        "MDS shards below `path`", _documents, _shards, find=_indices, identity_files=_identity
    )
}
