"""Reader of MosaicML's MDS shards, plain or zstd-compressed.

A shard holds, little-endian: the number of samples n (uint32), n + 1 offsets from the file's start
(uint32), the writer's settings, the samples. A sample holds the sizes (uint32) of its columns of
variable size, then the columns' bytes in the index's order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bosch.errors import UserError
from bosch.files import read_regular
from data_prep.documents.mds_index import Shard

# Errors of decoders for damaged bytes.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError)

_SPANS = "indices"
# Array dtypes by their code, the first byte of an array without a fixed dtype.
_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def read_samples(folder: Path, shard: Shard, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The shard's samples as dictionaries of those of `columns` that it has.

    Raises UserError, with the file and the sample, if the shard is missing, truncated, damaged, or
    differs from its index (size, hashes, number of samples).
    """
    path, is_compressed = shard.file(folder)
    data = _shard_bytes(path, shard, is_compressed)
    header = np.frombuffer(data, "<u4", len(data) // 4)
    if len(header) < 2 + shard.samples or header[0] != shard.samples:
        raise UserError(f"{path}: expected {shard.samples} samples; the shard is damaged")
    offsets = header[1 : shard.samples + 2].tolist()
    decoders = [
        (name, _decoder(kind, f"{path}: column {name}") if name in columns else None)
        for name, kind in zip(shard.column_names, shard.column_encodings, strict=True)
    ]
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if not begin <= end <= len(data):
            raise UserError(f"{path}: ends inside sample {number}; get it again")
        try:
            yield _decode_sample(shard.column_sizes, decoders, data[begin:end])
        except _DAMAGE as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: sample {number} is damaged ({reason})") from None


def _shard_bytes(path: Path, shard: Shard, is_compressed: bool) -> memoryview:
    """The decompressed bytes of the shard, verified against the index."""
    stated = shard.zip_data if is_compressed and shard.zip_data is not None else shard.raw_data
    try:
        stored = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    stated.check(stored, path)
    if not is_compressed:
        return memoryview(stored)
    try:
        plain = pa.decompress(stored, decompressed_size=shard.raw_data.size, codec="zstd")
    except OSError as error:
        raise UserError(
            f"{path}: not a whole zstd file of {shard.raw_data.size:,} bytes ({error}); "
            "get it again"
        ) from None
    if not stated.hashes:
        shard.raw_data.check(plain, path)
    return memoryview(plain)


_Decoder = Callable[[memoryview], Any]


def _decode_sample(
    fixed_sizes: Sequence[int | None],
    decoders: Sequence[tuple[str, _Decoder | None]],
    data: memoryview,
) -> dict[str, Any]:
    variable = fixed_sizes.count(None)
    sizes = iter(np.frombuffer(data, "<u4", variable).tolist())
    sample, at = {}, 4 * variable
    for (name, decode), fixed in zip(decoders, fixed_sizes, strict=True):
        size = next(sizes) if fixed is None else fixed
        if at + size > len(data):
            raise ValueError(f"column {name} is cut short")
        if decode is not None:
            sample[name] = decode(data[at : at + size])
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes are left over")
    return sample


def _decoder(encoding: str, where: str) -> _Decoder:
    kind, *fixed = encoding.split(":")
    if encoding == "str":
        return lambda data: bytes(data).decode()
    if encoding == "json":
        return lambda data: json.loads(bytes(data))
    if encoding == "bytes":  # llm-foundry before 0.8
        return lambda data: np.frombuffer(data, "<i8")
    is_known_dtype = not fixed or fixed[0] in _TYPES.values()
    if kind == "ndarray" and is_known_dtype and len(fixed) <= 2:
        return partial(_decode_array, fixed)
    raise UserError(
        f"{where} has the encoding {encoding[:100]}, which is not read; write it as str, json, "
        "bytes (of int64) or ndarray"
    )


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
        where = f"{path}, sample {row}"
        ids = _token_ids(sample[column], column, vocabulary, tokenizer.name_or_path, where)
        for begin, end in _spans(sample, len(ids), where):
            yield tokenizer.decode(
                ids[begin:end].tolist(),
                skip_special_tokens=not special_tokens,
                clean_up_tokenization_spaces=False,
            )


def _token_ids(values: Any, column: str, vocabulary: int, tokenizer: str, where: str) -> np.ndarray:
    ids = _whole_numbers(values, column, where)
    if ids.ndim != 1:
        raise UserError(f"{where}: {column} has {ids.ndim} dimensions; expected 1")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        token = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise UserError(
            f"{where}: token {token} is not in the vocabulary of {tokenizer}; "
            "name the tokenizer the shards were written with"
        )
    return ids


def _spans(sample: dict[str, Any], tokens: int, where: str) -> list[tuple[int, int]]:
    if _SPANS not in sample:
        return [(0, tokens)]
    spans = _whole_numbers(sample[_SPANS], _SPANS, where)
    if not spans.size:
        return []
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise UserError(f"{where}: {_SPANS} has the shape {spans.shape}; expected pairs")
    begins, ends = spans[:, 0], spans[:, 1]
    if int(begins.min()) < 0 or bool((begins > ends).any()) or int(ends.max()) > tokens:
        raise UserError(f"{where}: {_SPANS} has a span outside the record's {tokens:,} tokens")
    return [(int(begin), int(end)) for begin, end in spans.tolist()]


def _whole_numbers(values: Any, column: str, where: str) -> np.ndarray:
    try:
        numbers = np.asarray(values)
    except ValueError:
        numbers = np.asarray(None)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise UserError(f"{where}: {column} does not hold whole numbers")
    return numbers
