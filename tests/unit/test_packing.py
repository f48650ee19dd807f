from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.progress import Progress
from data_prep.mixture import DocumentStream, mix
from data_prep.packing import Packed, pack, write_dataset
from data_prep.sources import Source
from data_prep.tokenize import (
    Block,
    Encoder,
    TokenisedSource,
    TokenizerSpec,
    read_shard,
    tokenise_source,
)
from tests.tiny_data import tiny_tokenizer


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 16))
def test_packing_loses_no_token_and_keeps_spans(lengths, sequence_length):
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


def test_dataset_can_be_opened(tmp_path, monkeypatch):
    from datasets import load_from_disk

    monkeypatch.setattr("data_prep.packing._FILE_TOKENS", 24)
    monkeypatch.setattr("data_prep.packing._BATCH_TOKENS", 16)
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
def test_mixture_keeps_shares_and_total(tokens, weight, seed):
    streams = [stream("a", [5, 9, 30] * 10, 0, seed), stream("b", [7, 1, 2] * 10, 1, seed)]
    documents = list(mix(streams, [weight, 1.0], tokens))
    assert sum(map(len, documents)) == tokens == sum(s.tokens for s in streams)
    share = weight / (weight + 1)
    assert streams[0].tokens - share * tokens <= 30
    assert streams[1].tokens - (1 - share) * tokens <= 7


def test_source_is_repeated_in_another_order(caplog):
    short = stream("short", [1] * 50, 0)
    first = [int(short.next()[0]) for _ in range(50)]
    second = [int(short.next()[0]) for _ in range(50)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert short.epochs == 2.0
    assert "source short has only 50 tokens and is repeated" in caplog.text


@pytest.mark.parametrize("fast", [True, False])
def test_special_tokens_in_text_are_text(tmp_path, fast):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder.load(TokenizerSpec(str(tmp_path)))
    encoder = encoder if fast else replace(encoder, backend=None)
    ids = encoder(["a<|end|>b", "c"])
    assert [i.count(0) for i in ids] == [1, 1]
    assert all(i[-1] == 0 for i in ids)
    assert tokenizer.decode(ids[0][:-1]) == "a<|end|>b"


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(6):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"text number {i} " * (i + 1) * 20)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def tokenise(corpus, folder, workers, tokens=10**9):
    return tokenise_source(
        Source("s", "text", str(corpus / "corpus")),
        Encoder.load(TokenizerSpec(str(corpus / "tokenizer"))),
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


def test_number_of_workers_changes_nothing(corpus, monkeypatch):
    monkeypatch.setattr("data_prep.sources._PART_BYTES", 500)
    one, two = tokenise(corpus, "one", 1), tokenise(corpus, "two", 2)
    assert len(contents(one)) == 6
    assert contents(one) == contents(two)
    assert (
        one.text_bytes
        == two.text_bytes
        == sum(len(f"text number {i} ") * (i + 1) * 20 for i in range(6))
    )


def test_only_as_much_as_is_needed(corpus, monkeypatch):
    monkeypatch.setattr("data_prep.sources._PART_BYTES", 500)
    whole = tokenise(corpus, "whole", 1)
    some = tokenise(corpus, "some", 1, tokens=whole.tokens // 2)
    assert whole.tokens // 2 < some.tokens < whole.tokens
    assert contents(whole)[: some.documents] == contents(some)


def test_shards_are_kept(corpus, monkeypatch):
    """Whole shards of a killed run are used; its torn temporary files are not."""
    monkeypatch.setattr("data_prep.sources._PART_BYTES", 500)
    expected = contents(tokenise(corpus, "shards", 1))
    shards = sorted((corpus / "shards").glob("*.arrow"))
    kept = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    (corpus / "shards" / "part-000001.77.tmp").write_bytes(b"half")
    assert contents(tokenise(corpus, "shards", 1)) == expected
    assert shards[0].stat().st_mtime_ns == kept
    assert read_shard(shards[1])[1] > 0
