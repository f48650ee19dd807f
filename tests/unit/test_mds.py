"""The reader against shards that MosaicML's own library wrote (tests/data/mds)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bosch.errors import UserError
from data_prep.mds import read_documents, read_index, read_samples
from tests.tiny_data import tiny_tokenizer

SHARDS = Path(__file__).parents[1] / "data" / "mds"
TEXTS = ["First document. ", "Second one, a little longer. ", "Third: äöü €. "]


def samples(name: str) -> list[dict]:
    return [s for shard in read_index(SHARDS / name) for s in read_samples(shard)]


def text(ids) -> str:
    return bytes(np.asarray(ids).tolist()).decode()


@pytest.mark.parametrize("name", ["plain", "packed_zstd", "dynamic"])
def test_all_samples_are_read(name):
    found = samples(name)
    whole = ["".join(t * times for t in TEXTS) for times in range(1, 7)]
    assert [text(sample["input_ids"]) for sample in found] == whole
    if name != "dynamic":
        assert found[2]["domain"] == "d"
        assert found[2]["length"] == len(found[2]["input_ids"])


@pytest.mark.parametrize("name", ["packed_zstd", "dynamic"])
def test_spans_are_read(name):
    for times, sample in enumerate(samples(name), start=1):
        pieces = [text(sample["input_ids"][begin:end]) for begin, end in sample["indices"]]
        assert pieces == [t * times for t in TEXTS]


def test_columns_of_fixed_size():
    found = samples("fixed")
    assert [text(s["input_ids"]) for s in found] == ["First do"] * 2 + ["First do"] * 4
    assert [s["token_count"] for s in found] == [8] * 6


def test_text_column():
    assert [s["text"] for s in samples("text")] == TEXTS


def test_documents_are_cut_at_the_spans():
    tokenizer = tiny_tokenizer()
    found = [t for n in range(4) for t in read_documents(SHARDS / "packed_zstd", n, tokenizer)]
    ids = [s["input_ids"][a:b] for s in samples("packed_zstd") for a, b in s["indices"]]
    assert found == [tokenizer.decode(i.tolist()) for i in ids]
    assert len(found) == 18


def damaged(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(SHARDS / name, tmp_path / name))


def read_all(folder: Path) -> list[dict]:
    return [s for shard in read_index(folder) for s in read_samples(shard)]


def test_shard_cut_short(tmp_path):
    folder = damaged(tmp_path, "plain")
    shard = folder / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:1500])
    with pytest.raises(UserError, match=r"shard\.00000\.mds: ends inside sample 2"):
        read_all(folder)


def test_compressed_shard_cut_short(tmp_path):
    folder = damaged(tmp_path, "packed_zstd")
    shard = folder / "shard.00001.mds.zstd"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=r"shard\.00001\.mds\.zstd"):
        read_all(folder)


def test_missing_shard(tmp_path):
    folder = damaged(tmp_path, "plain")
    (folder / "shard.00002.mds").unlink()
    with pytest.raises(UserError, match=r"shard\.00002\.mds: .* not in the folder"):
        read_all(folder)


def test_unknown_version(tmp_path):
    folder = damaged(tmp_path, "plain")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["version"] = 3
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json: .*version 3"):
        read_all(folder)


def test_pickled_column_is_refused(tmp_path):
    folder = damaged(tmp_path, "plain")
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace('"str"', '"pkl"'))
    with pytest.raises(UserError, match="encoding pkl, which is not read"):
        read_all(folder)


def test_foreign_tokens_are_refused(tmp_path):
    folder = damaged(tmp_path, "plain")
    shard = folder / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-12:-8] = (700).to_bytes(4, "little")
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match="token 700 is not in the vocabulary"):
        list(read_documents(folder, 0, tiny_tokenizer()))
