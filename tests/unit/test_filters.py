from __future__ import annotations

import gzip
import json
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bosch.errors import UserError
from bosch.progress import Progress
from data_prep.documents import records
from data_prep.documents.records import Filters
from data_prep.documents.sources import Source
from data_prep.documents.tokenization import Block, TokenisedSource, tokenise_source
from data_prep.documents.tokenizer import Encoder, TokenizerSpec
from data_prep.text import TextFile
from tests.tiny_data import tiny_tokenizer

RECORDS = [
    {"text": "one two three", "language": "en", "year": 2020, "is_good": True},
    {"text": "eins zwei", "language": "de", "year": 2021, "is_good": True},
    {"text": "long " * 50, "language": "en", "year": 2022, "is_good": False},
    {"text": "no language", "language": None, "year": 2020, "is_good": True},
]


def texts(source: Source, folder, window: int = 2**17) -> tuple[list[str], int]:
    """The texts that pass, and how many do not."""
    tokenizer = tiny_tokenizer()
    encoder = Encoder(TokenizerSpec(""), tokenizer.backend_tokenizer.to_str(), 0)
    bar = Progress(None, "test", "tokens")
    tokenised = tokenise_source(
        source, encoder, folder, tokens=10**6, seed=0, sequence_length=64, workers=1, bar=bar
    )
    documents = [
        tokenizer.decode(block.ids[a : b - 1])
        for block in tokenised.blocks
        for a, b in zip(block.offsets[:-1], block.offsets[1:], strict=True)
    ]
    return documents, tokenised.left_out


def write_records(path, kind: str) -> str:
    path.mkdir()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path / "a.parquet")
    else:
        (path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "huggingface"])
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(matches={"language": "^en$"}), [0, 2]),
        (Filters(matches={"language": "e", "year": "202[01]"}), [0, 1]),
        (Filters(matches={"is_good": "^true$"}), [0, 1, 3]),
        (Filters(min_characters=11, max_characters=13), [0, 3]),
        (Filters(max_characters=100, matches={"language": "en"}), [0]),
    ],
)
def test_filters_choose_records(tmp_path, kind, filters, expected):
    source = Source("s", kind, write_records(tmp_path / "data", kind), filters=filters)
    documents, left_out = texts(source, tmp_path / "shards")
    assert documents == [RECORDS[i]["text"] for i in expected]
    assert left_out == 4 - len(expected)


def test_missing_field_matches_nothing(tmp_path):
    path = write_records(tmp_path / "data", "jsonl")
    source = Source("s", "jsonl", path, filters=Filters(matches={"lang": ""}))
    with pytest.raises(UserError, match="source s: its filters leave out all 4 documents"):
        texts(source, tmp_path / "shards")


@pytest.mark.parametrize("window", [2**17, 64])
def test_bounds_of_tokens_and_characters(tmp_path, monkeypatch, window):
    """Also of documents that are encoded in pieces, whose ids are then taken back."""
    for module in ("tokenizer", "tokenization", "sources"):
        monkeypatch.setattr(f"data_prep.documents.{module}.WINDOW", window)
    monkeypatch.setattr("data_prep.documents.tokenizer.OVERLAP", 32)
    contents = ["short", "in between " * 10, "much longer " * 40, "tail"]
    sizes = [len(tiny_tokenizer()(text)["input_ids"]) for text in contents]
    (tmp_path / "data").mkdir()
    for index, text in enumerate(contents):
        (tmp_path / "data" / f"{index}.txt").write_text(text)
    path = str(tmp_path / "data")
    for number, (filters, expected) in enumerate(
        [
            (Filters(min_tokens=sizes[1], max_tokens=sizes[1]), contents[1:2]),
            (Filters(max_tokens=sizes[2] - 1), [contents[i] for i in (0, 1, 3)]),
            (Filters(min_tokens=sizes[1] + 1), contents[2:3]),
            (Filters(min_characters=5, max_characters=110), contents[:2]),
        ]
    ):
        source = Source("s", "text", path, filters=filters)
        assert texts(source, tmp_path / f"shards{number}") == (expected, 4 - len(expected))


def test_length_histogram():
    lengths = [1, 2, 3, 4, 5, 8, 9, 1000]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    blocks = [Block(np.zeros(32, np.int32), offsets[:7]), Block(np.zeros(1, np.int32), offsets[6:])]
    histogram = TokenisedSource(Source("s", "text"), blocks, 0).length_histogram()
    assert [(one["up_to"], one["documents"], one["tokens"]) for one in histogram] == [
        (1, 1, 1), (2, 1, 2), (4, 2, 7), (8, 2, 13), (16, 1, 9), (1024, 1, 1000),
    ]  # fmt: skip


def test_characters_of_a_file_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("ä" * 300_000)
    file = TextFile(tmp_path / "a.txt")
    assert Filters(max_characters=300_000).allow_text(file)
    assert not Filters(max_characters=299_999).allow_text(file)


def test_what_a_compressed_file_becomes_is_bounded_by_its_size(tmp_path, monkeypatch):
    """By a constant and a multiple of it, so that neither small nor large files are refused."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one two"}\n' * 500))
    times = 10_000 // path.stat().st_size + 1
    for constant, ratio, is_read in ((10_000, 0, True), (0, times, True), (9_999, 0, False)):
        monkeypatch.setattr(records, "MOST_DECOMPRESSED", constant)
        monkeypatch.setattr(records, "MOST_RATIO", ratio)
        with nullcontext() if is_read else pytest.raises(UserError, match="that is no text"):
            assert len(list(records.read_rows(path, ()))) == 500
