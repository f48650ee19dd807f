"""Direct reader of MosaicML's MDS shards: an index.json and plain or zstd-compressed shard files.

A shard holds, little-endian: the number of samples n (uint32), n + 1 offsets from the file's start
(uint32), the writer's settings, the samples. A sample holds the sizes (uint32) of its columns of
variable size, then the columns' bytes in the index's order.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from data_prep.text import decode_utf8, read_utf8

_SCALARS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip

# An array of no fixed type says its type in the first byte.
_VALUE_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One shard of an index, and how its columns are written."""

    path: Path
    compressed: bool
    samples: int
    size: int
    columns: tuple[tuple[str, str, int | None], ...]


def read_index(folder: Path) -> list[Shard]:
    """The shards of a folder, in order.

    Raises:
        UserError: index.json is missing, damaged or of an unknown version, or a shard is missing.
    """
    index = folder / "index.json"
    if not index.is_file():
        raise UserError(f"{index}: no such file; an MDS folder holds one beside its shards")
    try:
        return [_shard(folder, entry) for entry in json.loads(read_utf8(index))["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: not an index of MDS shards, version 2 ({error!r})") from None


def _shard(folder: Path, entry: dict[str, Any]) -> Shard:
    if entry["version"] != 2 or entry["format"] != "mds":
        raise ValueError(f"format {entry['format']}, version {entry['version']}")
    raw = folder / entry["raw_data"]["basename"]
    zipped = entry["zip_data"]
    compressed = zipped is not None and not raw.exists()
    path = folder / zipped["basename"] if compressed else raw
    if not path.is_file():
        raise UserError(f"{path}: this shard is in index.json but not in the folder")
    if compressed and not entry["compression"].startswith("zstd"):
        raise UserError(f"{path}: compressed with {entry['compression']}; only zstd can be read")
    columns = zip(
        entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
    )
    return Shard(path, compressed, entry["samples"], path.stat().st_size, tuple(columns))


def read_samples(shard: Shard) -> Iterator[dict[str, Any]]:
    """The shard's samples as column name to value.

    Raises:
        UserError: the shard is cut short or damaged; names the file and the sample.
    """
    data = _shard_bytes(shard)
    header = np.frombuffer(data[: 4 * (len(data) // 4)], "<u4")
    if len(header) < 2 + shard.samples or header[0] != shard.samples:
        raise UserError(f"{shard.path}: expected {shard.samples} samples; the shard is damaged")
    offsets = header[1 : shard.samples + 2].tolist()
    for number in range(shard.samples):
        begin, end = offsets[number], offsets[number + 1]
        if not begin <= end <= len(data):
            raise UserError(f"{shard.path}: ends inside sample {number}; fetch it again")
        try:
            yield _decode_sample(shard, data[begin:end])
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{shard.path}: sample {number} is damaged ({error})") from None


def _shard_bytes(shard: Shard) -> bytes:
    data = shard.path.read_bytes()
    if not shard.compressed:
        return data
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            return reader.read()
    except zstandard.ZstdError as error:
        raise UserError(f"{shard.path}: not a whole zstd file ({error})") from None


def _decode_sample(shard: Shard, data: bytes) -> dict[str, Any]:
    variable = sum(size is None for _, _, size in shard.columns)
    sizes = iter(np.frombuffer(data[: 4 * variable], "<u4").tolist())
    sample, at = {}, 4 * variable
    for name, encoding, fixed in shard.columns:
        size = next(sizes) if fixed is None else fixed
        if at + size > len(data):
            raise ValueError(f"column {name} is cut short")
        sample[name] = _decode(encoding, data[at : at + size], f"{shard.path}: column {name}")
        at += size
    return sample


def _decode(encoding: str, data: bytes, where: str) -> Any:
    if encoding == "str":
        return decode_utf8(data, where)
    if encoding == "bytes":
        return data
    if encoding == "int":
        return int(np.frombuffer(data, "<i8")[0])
    if encoding in _SCALARS:
        return np.frombuffer(data, encoding)[0].item()
    if encoding == "json":
        return json.loads(data)
    if encoding.split(":")[0] == "ndarray":
        return _decode_array(encoding.split(":")[1:], data)
    raise UserError(
        f"{where} has the encoding {encoding}, which is not read; write it as str or ndarray"
    )


def _decode_array(fixed: list[str], data: bytes) -> np.ndarray:
    """An array; its type and shape stand before the data where the encoding lacks them."""
    at = 0
    if fixed:
        dtype = fixed[0]
    else:
        dtype, at = _VALUE_TYPES[data[0]], 1
    if len(fixed) > 1:
        shape = tuple(int(size) for size in fixed[1].split(","))
    else:
        dimensions, width = data[at] >> 2, 1 << (data[at] & 3)
        end = at + 1 + dimensions * width
        shape = tuple(np.frombuffer(data[at + 1 : end], f"<u{width}").tolist())
        at = end
    return np.frombuffer(data[at:], dtype).reshape(shape)


def read_documents(folder: Path, number: int, tokenizer: Any) -> Iterator[str]:
    """Texts of the folder's shard `number`: its token ids (`input_ids`) in words again.

    A packed record (with `indices`, pairs of start and end) gives one text per document.

    Args:
        tokenizer: The one the shards were written with.

    Raises:
        UserError: the shard is damaged, or holds tokens that this tokenizer does not have.
    """
    shard = read_index(folder)[number]
    for row, sample in enumerate(read_samples(shard)):
        if "input_ids" not in sample:
            raise UserError(f"{shard.path}: no column `input_ids` (there is {', '.join(sample)})")
        ids = np.asarray(sample["input_ids"])
        if len(ids) and int(ids.max()) >= len(tokenizer):
            raise UserError(
                f"{shard.path}, sample {row}: token {int(ids.max())} is not in the vocabulary of "
                f"{tokenizer.name_or_path}; name the tokenizer the shards were written with"
            )
        for begin, end in sample.get("indices", [(0, len(ids))]):
            yield tokenizer.decode(
                ids[begin:end].tolist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
