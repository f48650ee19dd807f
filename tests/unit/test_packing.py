"""Tokenising documents, leaving some out, mixing and packing."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bosch.errors import UserError
from bosch.progress import Progress
from data_prep.documents import encoding, tokenization
from data_prep.documents.encoding import Encoder
from data_prep.documents.packing import DocumentStream, Packed, mix, pack, write_dataset
from data_prep.documents.sources import Filters, Source
from data_prep.documents.tokenization import Block, TokenisedSource, tokenise_source
from data_prep.documents.tokenizer import TokenizerSpec
from data_prep.text import pydoc_topics
from tests.tiny_data import tiny_tokenizer


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 16))
def test_packing_loses_no_token_and_keeps_the_spans_of_documents(lengths, sequence_length):
    documents, start = [], 0
    for length in lengths:
        documents.append(np.arange(start, start + length, dtype=np.int32))
        start += length
    packed = list(pack(documents, sequence_length))
    assert len(packed) == start // sequence_length
    flat = [i for sequence in packed for i in sequence.input_ids]
    assert flat == list(range(len(packed) * sequence_length))
    borders = {0, *np.cumsum(lengths).tolist()}
    at = 0
    for sequence in packed:
        assert sum(sequence.document_lengths) == sequence_length
        for span in sequence.document_lengths:
            assert span > 0
            end = at + span
            assert end in borders or end % sequence_length == 0
            assert not borders & set(range(at + 1, end))
            at = end


def test_a_packed_dataset_can_be_opened(tmp_path, monkeypatch):
    from datasets import load_from_disk

    monkeypatch.setattr("data_prep.documents.packing.FILE_TOKENS", 24)
    monkeypatch.setattr("data_prep.documents.packing.BATCH_TOKENS", 16)
    rows = [Packed(np.arange(i, i + 8, dtype=np.int32), [3, 5][: 1 + i % 2]) for i in range(7)]
    write_dataset(tmp_path, rows, 7, 8)
    dataset = load_from_disk(str(tmp_path))
    assert len(list(tmp_path.glob("data-*.arrow"))) == 3
    assert dataset["input_ids"][:] == [row.input_ids.tolist() for row in rows]
    assert dataset["document_lengths"][:] == [row.document_lengths for row in rows]
    assert str(dataset.features["input_ids"].feature.dtype) == "int32"
    assert dataset.features["input_ids"].length == 8


def stream(name: str, lengths: list[int], number: int, seed: int = 0) -> DocumentStream:
    ids = np.concatenate([np.full(n, i, np.int32) for i, n in enumerate(lengths)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    half = len(lengths) // 2
    blocks = [Block(ids, offsets[: half + 1]), Block(ids, offsets[half:])]
    return DocumentStream(TokenisedSource(Source(name, "text", "x"), blocks, 0), seed, number)


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0.1, 10), st.integers(0, 5))
def test_a_mixture_keeps_shares_and_total(tokens, weight, seed):
    streams = [stream("a", [5, 9, 30] * 10, 0, seed), stream("b", [7, 1, 2] * 10, 1, seed)]
    documents = list(mix(streams, [weight, 1.0], tokens))
    assert sum(map(len, documents)) == tokens == sum(s.tokens for s in streams)
    share = weight / (weight + 1)
    assert streams[0].tokens - share * tokens <= 30
    assert streams[1].tokens - (1 - share) * tokens <= 7


def test_a_source_is_repeated_in_another_order(caplog):
    short = stream("short", [1] * 50, 0)
    first = [int(short.next()[0]) for _ in range(50)]
    second = [int(short.next()[0]) for _ in range(50)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert short.epochs == 2.0
    assert "source short has only 50 tokens and is repeated" in caplog.text


@pytest.mark.parametrize("fast", [True, False])
def test_special_tokens_in_text_are_tokenised_as_text(tmp_path, fast):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder.load(TokenizerSpec(str(tmp_path)))
    encoder = encoder if fast else replace(encoder, backend=None)
    ids = encoder(["a<|end|>b", "c"])
    assert not any((i == 0).any() for i in ids)
    assert tokenizer.decode(ids[0]) == "a<|end|>b"
    assert np.concatenate(list(encoder.long("a<|end|>b"))).tolist() == ids[0].tolist()


@pytest.mark.parametrize("run", [3, 30, 50, 100, 301])
def test_a_document_encoded_in_windows_has_the_tokens_of_the_whole(monkeypatch, tmp_path, run):
    """If windows that begin inside a run pair it differently, they overlap more, or are cut."""
    monkeypatch.setattr(encoding, "WINDOW", 128)
    monkeypatch.setattr(encoding, "OVERLAP", 16)
    letters = [*"abcd ", "aa", "aaaa", "bc", "bcd"]
    merges = [("a", "a"), ("aa", "aa"), ("b", "c"), ("bc", "d")]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    encoder = Encoder.load(TokenizerSpec(str(tmp_path)))
    for start in range(100, 132):
        text = "bcd" * start + "a" * run + "dbc" * 90 + "a" * run + "bcd"
        text = text[start % 7 :]
        made = list(encoder.long(text))
        assert len(made) > 3
        assert np.concatenate(made).tolist() == encoder([text])[0].tolist()


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(6):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"text number {i} " * (i + 1) * 20)
    return tmp_path


def tiny_encoder() -> Encoder:
    return Encoder(TokenizerSpec(""), tiny_tokenizer().backend_tokenizer.to_str(), 0)


def tokenise(corpus, folder, workers=1, tokens=10**9, kind="text", filters=None, **fields):
    filters = filters or Filters()
    return tokenise_source(
        Source("s", kind, str(corpus / "corpus"), filters=filters, **fields),
        tiny_encoder(),
        corpus / folder,
        tokens=tokens,
        seed=0,
        sequence_length=128,
        workers=workers,
        bar=Progress(None, "test", "tokens"),
    )


def contents(tokenised: TokenisedSource) -> list[list[int]]:
    return [
        block.ids[a:b].tolist()
        for block in tokenised.blocks
        for a, b in zip(block.offsets[:-1], block.offsets[1:], strict=True)
    ]


@pytest.mark.skipif(tokenizers.__version__ == "0.23.1", reason="tokenizers leaks 64 bytes a text")
def test_a_compressed_file_needs_little_memory_for_its_documents(tmp_path, monkeypatch):
    """However large it is, it is one part, of millions of documents."""
    monkeypatch.setattr(tokenization, "WINDOW", 2**12)
    (tmp_path / "corpus").mkdir()

    def peak(count: int) -> int:
        with gzip.open(tmp_path / "corpus" / "a.jsonl.gz", "wb") as file:
            file.writelines(b'{"text": "x x"}\n' for _ in range(count))
        tracemalloc.start()
        try:
            assert tokenise(tmp_path, f"shards {count}", kind="jsonl").documents == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # including one-time imports
    # 36 bytes each, 89 in a list of pairs: seen with more than a buffer of documents.
    assert peak(25_000) - peak(10_000) < 60 * 15_000


def test_bytes_of_a_source_are_those_of_all_its_parts(corpus, monkeypatch):
    monkeypatch.setattr("data_prep.documents.sources.files.PART_BYTES", 500)
    expected = sum(len(f"text number {i} ") * (i + 1) * 20 for i in range(6))
    assert tokenise(corpus, "shards").text_bytes == expected


def test_short_documents_are_encoded_in_groups_also_between_filtered_ones(tmp_path, monkeypatch):
    """40 documents of a tenth of a group each, of which every other one is filtered out."""
    monkeypatch.setattr(tokenization, "WINDOW", 1000)
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": "ab"[number % 2] * (100 + number % 2)}) for number in range(40)]
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(lines))
    groups, encode = [], Encoder.__call__

    def counting(self, texts):
        groups.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "__call__", counting)
    found = tokenise(tmp_path, "shards", kind="jsonl", filters=Filters(max_characters=100))
    assert groups == [10, 10] and (found.documents, found.left_out) == (20, 20)


def test_parts_are_read_until_there_are_more_tokens_than_needed(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name in "abc":
        (tmp_path / "corpus" / f"{name}.jsonl").write_text(json.dumps({"text": name * 20}) + "\n")
    [first] = tokenise(tmp_path, "one", tokens=1, kind="jsonl").blocks
    for tokens, blocks in ((first.tokens - 1, 1), (first.tokens, 2)):
        found = tokenise(tmp_path, f"{tokens}", tokens=tokens, kind="jsonl").blocks
        assert len(found) == blocks


_POOL = """
import time
from data_prep.documents.tokenization import in_order
if __name__ == "__main__":
    results = in_order(len, [(1,), (2,), (3,)], 2)
    next(results)
    print("works", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them on Linux only")
def test_workers_end_if_their_process_is_killed(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(_POOL)
    environment = {**os.environ, "PYTHONPATH": str(Path(tokenization.__file__).parents[2])}
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"works\n"
        workers = psutil.Process(process.pid).children()
        assert len(workers) >= 2
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def sentence_piece_tokenizer(texts: list[str]) -> Tokenizer:
    """A BPE over whole texts, with visible blanks and an additional one before the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], show_progress=False, limit_alphabet=200
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


UNUSUAL = "naïve e\u0301 日本語のテキスト 👩‍👩‍👧 \x00 \ufeff   \t\n\n 1234567 don't <|end|> "


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_a_long_document_has_the_tokens_of_the_whole(monkeypatch, kind):
    topics = list(pydoc_topics().values())
    text = (UNUSUAL * 20).join(topics[:12])
    if kind == "byte level":
        backend = tiny_tokenizer().backend_tokenizer
    else:
        backend = sentence_piece_tokenizer([*topics[:3], UNUSUAL])
    encoder = Encoder(TokenizerSpec(""), backend.to_str(), 0)
    [whole] = encoder([text])
    monkeypatch.setattr("data_prep.documents.encoding.OVERLAP", 256)
    for window in (2048, 3001, 9999):
        monkeypatch.setattr("data_prep.documents.encoding.WINDOW", window)
        pieces = list(encoder.long(text))
        assert len(pieces) > len(text) // window
        assert np.concatenate(pieces).tolist() == whole.tolist()


@pytest.mark.parametrize("text", ["a", "ab" * 5000, " " * 9000, "x" * 4097 + " y"])
def test_text_without_a_place_to_cut_is_not_lost(monkeypatch, text):
    monkeypatch.setattr("data_prep.documents.encoding.OVERLAP", 256)
    monkeypatch.setattr("data_prep.documents.encoding.WINDOW", 2048)
    ids = np.concatenate(list(tiny_encoder().long(text)))
    assert tiny_tokenizer().decode(ids) == text


def test_documents_of_all_sizes_stay_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.documents.encoding.OVERLAP", 64)
    for module in ("encoding", "tokenization"):
        monkeypatch.setattr(f"data_prep.documents.{module}.WINDOW", 512)
    texts = ["\ufeff" * (i == 2) + f"document {i} é " * (1 + 90 * (i % 3)) for i in range(7)]
    (tmp_path / "corpus").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "corpus" / f"{i}.txt").write_text(text)
    tokenised = tokenise(tmp_path, "shards")
    encoder = tiny_encoder()
    plain = [text.removeprefix("\ufeff") for text in texts]
    assert contents(tokenised) == [[*ids.tolist(), 0] for ids in encoder(plain)]
    assert tokenised.text_bytes == sum(len(text.encode()) for text in plain)


RECORDS = [
    {"text": "one two three", "language": "en", "year": 2020, "is_good": True},
    {"text": "eins zwei", "language": "de", "year": 2021, "is_good": True},
    {"text": "long " * 50, "language": "en", "year": 2022, "is_good": False},
    {"text": "no language", "language": None, "year": 2020, "is_good": True},
]


def passing(tokenised: TokenisedSource) -> list[str]:
    """The texts that pass the filters."""
    return [tiny_tokenizer().decode(ids[:-1]) for ids in contents(tokenised)]


def write_records(path, kind):
    path.mkdir()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path / "a.parquet")
    else:
        (path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
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
def test_filters_select_records(tmp_path, kind, filters, expected):
    write_records(tmp_path / "corpus", kind)
    tokenised = tokenise(tmp_path, "shards", kind=kind, filters=filters)
    assert passing(tokenised) == [RECORDS[i]["text"] for i in expected]
    assert tokenised.left_out == 4 - len(expected)


def test_a_missing_field_matches_nothing(tmp_path):
    kind = "jsonl"
    write_records(tmp_path / "corpus", kind)
    with pytest.raises(UserError, match="source s: its filters leave out all 4 documents"):
        tokenise(tmp_path, "shards", kind=kind, filters=Filters(matches={"lang": ""}))


@pytest.mark.parametrize("window", [2**17, 64])
def test_bounds_of_tokens_and_characters(tmp_path, monkeypatch, window):
    """Also of documents that are encoded in windows."""
    for module in ("encoding", "tokenization"):
        monkeypatch.setattr(f"data_prep.documents.{module}.WINDOW", window)
    monkeypatch.setattr("data_prep.documents.encoding.OVERLAP", 32)
    texts = ["short", "in between " * 10, "much longer " * 40, "tail"]
    sizes = [len(tiny_tokenizer()(text)["input_ids"]) for text in texts]
    (tmp_path / "corpus").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / "corpus" / f"{index}.txt").write_text(text)
    for number, (filters, expected) in enumerate(
        [
            (Filters(min_tokens=sizes[1], max_tokens=sizes[1]), texts[1:2]),
            (Filters(max_tokens=sizes[2] - 1), [texts[i] for i in (0, 1, 3)]),
            (Filters(min_tokens=sizes[1] + 1), texts[2:3]),
            (Filters(min_characters=5, max_characters=110), texts[:2]),
        ]
    ):
        tokenised = tokenise(tmp_path, f"shards{number}", filters=filters)
        assert (passing(tokenised), tokenised.left_out) == (expected, 4 - len(expected))


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_are_skipped_up_to_a_number(tmp_path, monkeypatch, caplog, workers):
    """Counted over all parts of the source; a finished part keeps its number."""
    lines = [json.dumps({"text": f"text {n}", "n": n}) for n in range(9)]
    lines[2], lines[5], lines[7] = '{"text": null}', "{oops", '{"body": "x"}'
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(lines))
    if workers == 1:
        monkeypatch.setattr("data_prep.documents.sources.files.PART_BYTES", 50)
    with pytest.raises(UserError, match=r"a\.jsonl, line (3|6|8): ") as caught:
        tokenise(tmp_path, "none", workers, kind="jsonl")
    assert "bad record" not in str(caught.value)
    with pytest.raises(UserError, match=r"line \d: .* \(bad record 3; skip_bad_records is 2\)$"):
        tokenise(tmp_path, "two", workers, kind="jsonl", skip_bad_records=2)
    for _ in range(2):
        tokenised = tokenise(tmp_path, "three", workers, kind="jsonl", skip_bad_records=3)
        assert tokenised.skipped == 3 and tokenised.left_out == 0
        assert sorted(passing(tokenised)) == [f"text {n}" for n in (0, 1, 3, 4, 6, 8)]
    assert caplog.text.count("source s: skipped 3 bad records, the first: ") == 2
