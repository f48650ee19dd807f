"""The reader against shards that MosaicML's own library wrote (tests/data/mds).

By `MDSWriter` of mosaicml-streaming 0.13, with sha1 and at most 2,200 bytes a shard. Token ids are
the bytes of TEXTS, each repeated 1 to 6 times.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from bosch.errors import UserError
from data_prep.documents.encoding import decode
from data_prep.documents.sources import Source, Tokens, documents
from data_prep.documents.sources.mds import read_index, read_samples
from tests.tiny_data import tiny_tokenizer

SHARDS = Path(__file__).parents[1] / "data" / "mds"
TEXTS = ["First document. ", "Second one, a little longer. ", "Third: äöü €. "]


def text(ids) -> str:
    return bytes(np.asarray(ids).tolist()).decode()


def damaged(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(SHARDS / name, tmp_path / name))


def read_all(folder: Path) -> list[dict]:
    shards = read_index(folder / "index.json")
    return [s for shard in shards for s in read_samples(folder, shard, ("input_ids", "indices"))]


def read(folder: Path, tokenizer: Any = None, field: str = "text") -> list[str]:
    """The texts of a source in the shards' order, decoded by the tokenizer."""
    tokenizer, parts = tokenizer or tiny_tokenizer(), list[tuple[str, str]]()
    for one in documents(Source("s", "mds", str(folder), field, "its own")):
        assert isinstance(one, str) or (isinstance(one, Tokens) and one.tokenizer == "its own")
        parts.append(("", one) if isinstance(one, str) else (one.place, decode(tokenizer, one)))
    return [text for _, text in sorted(parts, key=lambda part: part[0])]


@pytest.mark.parametrize("name", ["plain", "packed_zstd", "dynamic"])
def test_all_samples_and_spans_are_read(name):
    whole = ["".join(t * times for t in TEXTS) for times in range(1, 7)]
    samples = read_all(SHARDS / name)
    assert [text(sample["input_ids"]) for sample in samples] == whole
    for times, sample in enumerate(samples if name != "plain" else (), start=1):
        pieces = [text(sample["input_ids"][begin:end]) for begin, end in sample["indices"]]
        assert pieces == [t * times for t in TEXTS]


def test_columns_of_fixed_size_are_read():
    records = read_all(SHARDS / "fixed")
    assert [text(s["input_ids"]) for s in records] == ["First do"] * 2 + ["First do"] * 4
    assert read_all(SHARDS / "text") == [{}] * 3  # other columns are not decoded


def test_documents_are_split_at_their_spans():
    samples = read_all(SHARDS / "packed_zstd")
    ids = [sample["input_ids"][a:b] for sample in samples for a, b in sample["indices"]]
    assert read(SHARDS / "packed_zstd") == [tiny_tokenizer().decode(i.tolist()) for i in ids]
    assert len(ids) == 18


def test_a_merged_index_is_read_instead_of_those_below_it(tmp_path):
    shutil.copytree(SHARDS / "plain", tmp_path / "sub")
    merged = json.loads((tmp_path / "sub" / "index.json").read_text())
    for shard in merged["shards"]:
        shard["raw_data"]["basename"] = f"sub/{shard['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps(merged))
    assert read(tmp_path) == read(SHARDS / "plain")


def change_index(folder: Path, place: str, value: object) -> None:
    """Set the value at a dotted path of the index; DELETE removes it."""
    index = json.loads((folder / "index.json").read_text())
    *path, last = place.split(".")
    entry = index
    for part in path:
        entry = entry[int(part) if isinstance(entry, list) else part]
    if value is DELETE:
        del entry[int(last) if isinstance(entry, list) else last]
    else:
        entry[int(last) if isinstance(entry, list) else last] = value
    (folder / "index.json").write_text(json.dumps(index))


DELETE = object()


@pytest.mark.parametrize("name", ["plain", "packed_zstd"])
def test_a_shard_with_a_flipped_bit_is_refused(tmp_path, name):
    folder = damaged(tmp_path, name)
    shard = sorted(folder.glob("shard.00001.mds*"))[0]
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match=rf"{shard.name}: its sha1 is not index\.json's"):
        read(folder)
    if name == "packed_zstd":  # or only of the plain form
        change_index(folder, "shards.1.zip_data.hashes", {})
        with pytest.raises(UserError, match=r"its sha1|ZSTD"):
            read(folder)


@pytest.mark.parametrize("algorithm", ["xxh3_64", "md5"])
def test_hashes_of_the_library_are_verified(tmp_path, algorithm):
    folder = damaged(tmp_path, "plain")
    data = (folder / "shard.00000.mds").read_bytes()
    module = xxhash if algorithm.startswith("xxh") else hashlib
    digest = getattr(module, algorithm)(data).hexdigest()
    change_index(folder, "shards.0.raw_data.hashes", {algorithm: digest.upper()})
    assert len(read_all(folder)) == 6
    change_index(folder, "shards.0.raw_data.hashes", {algorithm: "0" * len(digest)})
    with pytest.raises(UserError, match=f"its {algorithm} is not"):
        read_all(folder)


def test_truncated_missing_and_other_shards_are_refused(tmp_path):
    folder = damaged(tmp_path, "plain")
    shard = folder / "shard.00000.mds"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"shard\.00000\.mds: has 100 bytes where .* {size:,}"):
        read_all(folder)
    folder = damaged(tmp_path, "packed_zstd")
    (folder / "shard.00001.mds.zstd").unlink()
    with pytest.raises(
        UserError, match=r"shard\.00001\.mds\.zstd: this shard is in index\.json but"
    ):
        next(documents(Source("s", "mds", str(folder), tokenizer="x")))  # before any is read


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("shards", {}),
        ("shards.0.version", 3),
        ("shards.0.raw_data", None),
        ("shards.0.samples", "x"),
    ],
)
def test_wrong_values_in_the_index_are_reported(tmp_path, place, value):
    folder = damaged(tmp_path, "plain")
    change_index(folder, place, value)
    with pytest.raises(UserError, match=rf"index\.json: not an index .*{place}"):
        read_all(folder)


def write_sample(folder: Path, **columns: tuple[str, bytes]) -> Path:
    """A shard of one sample whose columns have these encodings and bytes."""
    sizes = np.array([len(data) for _, data in columns.values()], "<u4").tobytes()
    sample = sizes + b"".join(data for _, data in columns.values())
    content = np.array([1, 12, 12 + len(sample)], "<u4").tobytes() + sample
    shard = {
        "version": 2, "format": "mds", "samples": 1, "compression": None, "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "column_names": list(columns), "column_sizes": [None] * len(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
    }  # fmt: skip
    (folder / "shard.00000.mds").write_bytes(content)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def u32(*numbers: int, shape: tuple[int, ...] | None = None) -> tuple[str, bytes]:
    sizes = ",".join(map(str, shape or (len(numbers),)))
    return f"ndarray:uint32:{sizes}", np.array(numbers, "<u4").tobytes()


@pytest.mark.parametrize(("bits", "place"), [(8, 0), (16, 2), (32, 1), (64, 1)])
def test_numbers_of_every_type_are_read(tmp_path, bits, place):
    """In arrays whose type and shape are in the encoding or before the data."""
    kinds = ["uint", "int", "float" if bits > 8 else "int"]
    name, code = f"{kinds[place]}{bits}", bits + kinds.index(kinds[place])
    data = np.array([[1, 2, 3]], name)
    shape = bytes([2 << 2 | place]) + np.array([1, 3], f"<u{1 << place}").tobytes()
    for encoding in (
        (f"ndarray:{name}:1,3", data.tobytes()),
        (f"ndarray:{name}", shape + data.tobytes()),
        ("ndarray", bytes([code]) + shape + data.tobytes()),
    ):
        [sample] = read_all(write_sample(tmp_path, input_ids=encoding))
        assert sample["input_ids"].dtype == name
        assert sample["input_ids"].tolist() == [[1, 2, 3]]


def test_special_tokens_are_dropped(tmp_path):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("One. ")["input_ids"]
    folder = write_sample(tmp_path, input_ids=u32(*ids, tokenizer.eos_token_id, *ids))
    assert read(folder) == ["One. One. "]


def test_blanks_before_marks_stay_whatever_the_tokenizer_prefers(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    folder = write_sample(tmp_path, input_ids=u32(*tokenizer("a , b .")["input_ids"]))
    assert read(folder, tokenizer) == ["a , b ."]


IDS = u32(*range(10))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": IDS, "indices": u32(0, 11, shape=(1, 2))}, "a span outside the record"),
        ({"input_ids": ("ndarray:float32", b"\x04\x01" + b"\0" * 4)}, "is no list of token ids"),
        ({"input_ids": u32(1, 2, 3, 4, shape=(2, 2))}, "input_ids is no list of token ids"),
        ({"input_ids": ("json", b"[-4]")}, "token -4 is not in the vocabulary"),
        ({"input_ids": u32(511, 512)}, "token 512 is not in the vocabulary"),
    ],
)
def test_a_sample_with_wrong_values_is_refused(tmp_path, columns, message):
    with pytest.raises(UserError, match=rf"shard\.00000\.mds.*{message}"):
        read(write_sample(tmp_path, **columns))


def test_a_column_of_another_encoding_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"source s: .* cannot be read \(.* encoded as pkl;"):
        read(write_sample(tmp_path, input_ids=("pkl", b"abcd")))


def test_a_sample_of_another_size_than_its_columns_is_damaged(tmp_path):
    folder = write_sample(tmp_path, input_ids=IDS, indices=("json", b"[]"))
    assert read(folder) == []  # without spans it has no document
    for column in ("names", "sizes", "encodings"):
        change_index(folder, f"shards.0.column_{column}.1", DELETE)
    with pytest.raises(UserError, match=r"a sample has 50 bytes, its columns others"):
        read(folder)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"text": ("str", b"a \xc3\xa9 b")}, "text"),
        ({"body": ("str", b"a \xc3\xa9 b"), "text": ("str", b"other")}, "body"),
        ({"text": ("str", b"a \xc3\xa9 b"), "tokens": ("bytes", b"")}, "text"),
        ({"tokens": ("bytes", "int64")}, "text"),
        ({"tokens": ("ndarray:int32", "int32")}, "text"),
        ({"input_ids": ("bytes", "int64")}, "text"),
        ({"ids": ("bytes", "int64"), "text": ("str", b"other")}, "ids"),
    ],
)
def test_layouts_of_llm_foundry_are_read(tmp_path, columns, field):
    """`tokens` as an array, or as bytes of int64 (before 0.8); texts need no tokenizer."""
    ids = tiny_tokenizer()("a é b")["input_ids"]
    shape = {"int64": b"", "int32": bytes([1 << 2 | 2]) + np.array([len(ids)], "<u4").tobytes()}
    for name, (encoding, data) in columns.items():
        if isinstance(data, str):
            columns[name] = encoding, shape[data] + np.array(ids, data).tobytes()
    folder = write_sample(tmp_path, **columns)
    assert read(folder, field=field) == ["a é b"]
    source = Source("s", "mds", str(folder), field)
    if field in columns and columns[field][0] == "str":
        assert list(documents(source)) == ["a é b"]
    else:
        with pytest.raises(UserError, match=r"index\.json: column .* tokens; name their tokenizer"):
            list(documents(source))
    with pytest.raises(UserError, match=rf"no column `gone` .there is {', '.join(columns)}."):
        list(documents(replace(source, text_field="gone")))
