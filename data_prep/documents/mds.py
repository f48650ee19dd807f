"""Reader of MosaicML's MDS shards, plain or zstd-compressed.

A shard holds, little-endian: the number of samples n (uint32), n + 1 offsets from the file's start
(uint32), the writer's settings, the samples. A sample holds the sizes (uint32) of its columns of
variable size, then the columns' bytes in the index's order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from bosch.errors import UserError
from data_prep.documents.mds_index import INDEX, Shard, ShardFile

_SPANS = "indices"
# Array dtypes by their code, the first byte of an array without a fixed dtype.
_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def read_samples(folder: Path, shard: Shard, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The shard's samples as dictionaries of those of `columns` that it has.

    Raises UserError, with the file, if its size or hash is not that of the index.
    """
    path, entry = shard.file(folder)
    stored = path.read_bytes()
    _check(path, stored, entry)
    data = memoryview(stored)
    if entry is not shard.raw_data:
        plain = pa.decompress(stored, decompressed_size=shard.raw_data.size, codec="zstd")
        if not entry.hashes:
            _check(path, plain, shard.raw_data)
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


def _check(path: Path, data: Any, stated: ShardFile) -> None:
    """Raise UserError unless `data`, read from `path`, has the stated size and hashes."""
    if len(data) != stated.size:
        raise UserError(
            f"{path}: has {len(data):,} bytes where {INDEX} states {stated.size:,}; get it again"
        )
    for name, digest in stated.hashes.items():
        module: Any = xxhash if name in xxhash.algorithms_available else hashlib
        if getattr(module, name)(data).hexdigest() != digest.lower():
            raise UserError(f"{path}: its {name} is not the one that {INDEX} states; get it again")


def _decode(encoding: str, data: memoryview) -> Any:
    kind, *fixed = encoding.split(":")
    match kind:
        case "str":
            return bytes(data).decode()
        case "json":
            return json.loads(bytes(data))
        case "bytes":  # llm-foundry before 0.8
            return np.frombuffer(data, "<i8")
        case "ndarray":
            return _decode_array(fixed, data)
    raise ValueError(f"a column of tokens is encoded as {encoding}; write it as json or ndarray")


def _decode_array(fixed: Sequence[str], data: memoryview) -> np.ndarray:
    """An array; its dtype and shape precede the data if the encoding does not fix them."""
    at = 0
    if fixed:
        dtype = fixed[0]
    else:
        dtype, at = _TYPES[data[0]], 1
    if len(fixed) > 1:
        shape = tuple(int(size) for size in fixed[1].split(","))
    else:
        dimensions, width = data[at] >> 2, 1 << (data[at] & 3)
        end = at + 1 + dimensions * width
        shape = tuple(np.frombuffer(data[at + 1 : end], f"<u{width}").tolist())
        at = end
    return np.frombuffer(data[at:], dtype).reshape(shape)


def read_texts(folder: Path, shard: Shard, column: str) -> Iterator[str]:
    """Texts of the shard's documents, from a column of texts."""
    for sample in read_samples(folder, shard, [column]):
        yield sample[column]


def read_tokens(
    folder: Path, shard: Shard, column: str, tokenizer: Any, special_tokens: bool
) -> Iterator[str]:
    """Texts of the shard's documents, decoded from a column of token ids.

    A packed record (with `indices`, pairs of start and end) gives one text per document.

    Args:
        tokenizer: The tokenizer with which the shards were written.
        special_tokens: Whether the texts include the shards' special tokens.

    Raises UserError if the shard is damaged, or has tokens that this tokenizer does not know.
    """
    path = shard.file(folder)[0]
    vocabulary = len(tokenizer)
    for row, sample in enumerate(read_samples(folder, shard, [column, _SPANS])):
        ids = np.asarray(sample[column])
        if (ids.dtype.kind not in "iu" and ids.size) or ids.ndim != 1:
            raise UserError(f"{path}, sample {row}: {column} is no list of token ids")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            token = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise UserError(
                f"{path}, sample {row}: token {token} is not in the vocabulary of "
                f"{tokenizer.name_or_path}; name the tokenizer the shards were written with"
            )
        for begin, end in sample.get(_SPANS, [(0, len(ids))]):
            if not 0 <= begin <= end <= len(ids):
                raise UserError(f"{path}, sample {row}: {_SPANS} has a span outside the record")
            yield tokenizer.decode(
                ids[begin:end].tolist(),
                skip_special_tokens=not special_tokens,
                clean_up_tokenization_spaces=False,
            )
