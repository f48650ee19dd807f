"""Tokenising documents, leaving some out, mixing and packing; which tokens of talks are learnt."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bosch.errors import UserError
from bosch.progress import Progress
from data_prep.documents import encoding, tokenization
from data_prep.documents.encoding import encode, encode_conversation
from data_prep.documents.packing import DocumentStream, Packed, mix, pack, write_dataset
from data_prep.documents.sources import Conversation, Filters, Source
from data_prep.documents.tokenization import Tokenised, tokenise
from data_prep.documents.tokenizer import TokenizerSpec
from data_prep.text import pydoc_topics
from stages.context import ModelConfig, Runtime, StageConfig
from stages.prepare.run import write_training_data
from stages.prepare.stage import PrepareConfig
from stages.train.data import collate
from tests.tiny_data import save_tiny_model, tiny_tokenizer


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 16))
def test_packing_loses_no_token_and_keeps_the_spans_of_documents(lengths, sequence_length):
    documents, start = [], 0
    for length in lengths:
        documents.append(np.arange(start, start + length, dtype=np.int32))
        start += length
    packed = list(pack(documents, sequence_length))
    assert len(packed) == start // sequence_length
    flat = [i for sequence in packed for i in sequence.signed]
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
    monkeypatch.setattr("data_prep.documents.packing.BATCH_TOKENS", 16)
    rows = [Packed(np.arange(i, i + 8, dtype=np.int32), [3, 5][: 1 + i % 2]) for i in range(7)]
    assert write_dataset(tmp_path, rows, 8, False, Progress(None, "test", "rows")) == 13
    dataset = load_from_disk(str(tmp_path))
    assert dataset["input_ids"][:] == [row.signed.tolist() for row in rows]
    assert dataset["document_lengths"][:] == [row.document_lengths for row in rows]
    assert str(dataset.features["input_ids"].feature.dtype) == "int32"
    assert dataset.features["input_ids"].length == 8


def stream(name: str, lengths: list[int], seed: int = 0) -> DocumentStream:
    ids = np.concatenate([np.full(n, i, np.int32) for i, n in enumerate(lengths)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    source = Source(name, "text", "x", seed=seed)
    return DocumentStream(Tokenised(source, ids, offsets, Counter(tokens=len(ids))))


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0.1, 10), st.integers(0, 5))
def test_a_mixture_keeps_shares_and_total(tokens, weight, seed):
    streams = [stream("a", [5, 9, 30] * 10, seed), stream("b", [7, 1, 2] * 10, seed)]
    share = weight / (weight + 1)
    documents = list(mix(streams, [share, 1 - share], tokens))
    assert sum(map(len, documents)) == tokens == sum(s.tokens for s in streams)
    assert streams[0].tokens - share * tokens <= 30
    assert streams[1].tokens - (1 - share) * tokens <= 7


def test_a_source_is_repeated_in_another_order(caplog):
    short = stream("short", [1] * 50)
    first = [int(short.next()[0]) for _ in range(50)]
    second = [int(short.next()[0]) for _ in range(50)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert "source short has only 50 tokens and is repeated" in caplog.text


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return TokenizerSpec(str(folder))


@pytest.fixture
def tokenised(tmp_path, spec):
    """Tokenises a source of these records, or of those that are there, by a tiny tokenizer."""
    corpus = tmp_path / "corpus"

    def tokenise_records(records=(), folder="tokens", workers=1, tokens=10**9, **fields):
        corpus.mkdir(exist_ok=True)
        for index, part in enumerate(records):
            lines = (one if isinstance(one, str) else json.dumps(one) for one in part)
            (corpus / f"{index}.jsonl").write_text("\n".join(lines))
        source = Source("s", fields.pop("kind", "jsonl"), str(corpus), **fields)
        bar = Progress(None, "test", "tokens")
        return tokenise(source, spec, tmp_path / folder, tokens=tokens, workers=workers, bar=bar)

    return tokenise_records


def contents(found: Tokenised) -> list[str]:
    """The texts of the documents, of which each ends with the end-of-text token."""
    documents = [found.ids[a:b] for a, b in itertools.pairwise(found.offsets)]
    assert all(ids[-1] == 0 for ids in documents)
    return [tiny_tokenizer().decode(ids[:-1]) for ids in documents]


UNUSUAL = "naïve e\u0301 日本語のテキスト 👩‍👩‍👧 \x00 \ufeff   \t\n\n 1234567 don't <|end|> "


def sentence_piece_tokenizer(texts: list[str]) -> Any:
    """A BPE over whole texts, with visible blanks and an additional one before the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], show_progress=False, limit_alphabet=200
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_a_long_document_has_the_tokens_of_the_whole(monkeypatch, kind):
    topics = list(pydoc_topics().values())
    text = (UNUSUAL * 20).join(topics[:12])
    is_bytes = kind == "byte level"
    tokenizer = tiny_tokenizer() if is_bytes else sentence_piece_tokenizer([*topics[:3], UNUSUAL])
    whole = encode(tokenizer, text).tolist()
    if is_bytes:  # also of special tokens
        assert tokenizer.decode(whole) == f"{text}<|end|>" and whole.count(0) == 1
    sizes, call = [], type(tokenizer).__call__

    def counting(self, texts, **options):
        sizes.extend(map(len, texts))
        return call(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    for window in (2048, 3001, 9999):
        monkeypatch.setattr(encoding, "WINDOW", window)
        sizes.clear()
        assert encode(tokenizer, text).tolist() == whole
        assert max(sizes) <= window < sum(sizes) == len(text)


@pytest.mark.parametrize("text", ["a", "ab" * 5000, " " * 9000, "x" * 4097 + " y"])
def test_text_without_a_place_to_cut_is_not_lost(monkeypatch, text):
    monkeypatch.setattr(encoding, "WINDOW", 2048)
    assert tiny_tokenizer().decode(encode(tiny_tokenizer(), text)[:-1]) == text


def test_blocks_are_read_until_there_are_more_tokens_than_needed(tokenised, monkeypatch):
    monkeypatch.setattr(tokenization, "BLOCK_CHARACTERS", 1)
    records = [[{"text": name * 20} for name in "abc"]]
    first = tokenised(records, "one", tokens=1)
    assert contents(first) == ["a" * 20]
    for tokens, count in ((len(first.ids) - 1, 1), (len(first.ids), 2)):
        assert len(contents(tokenised(records, f"{tokens}", tokens=tokens))) == count


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


RECORDS = [
    {"text": "one two three", "language": "en", "year": 2020, "is_good": True},
    {"text": "eins zwei", "language": "de", "year": 2021, "is_good": True},
    {"text": "long " * 50, "language": "en", "year": 2022, "is_good": False},
    {"text": "no language", "language": None, "year": 2020, "is_good": True},
]
SIZES = [len(tiny_tokenizer()(record["text"])["input_ids"]) for record in RECORDS]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"matches": {"language": "^en$"}}, [0, 2]),
        ({"matches": {"language": "e", "year": "202[01]"}}, [0, 1]),
        ({"matches": {"is_good": "^true$"}}, [0, 1, 3]),
        ({"min_characters": 11, "max_characters": 13}, [0, 3]),
        ({"max_characters": 100, "matches": {"language": "en"}}, [0]),
        ({"min_tokens": SIZES[3], "max_tokens": SIZES[3]}, [3]),
        ({"max_tokens": SIZES[2] - 1}, [0, 1, 3]),
        ({"min_tokens": SIZES[2]}, [2]),
        ({"matches": {"lang": ""}}, []),  # a missing field matches nothing
    ],
)
def test_filters_select_records(tmp_path, tokenised, kind, filters, expected):
    if kind == "parquet":
        (tmp_path / "corpus").mkdir()
        pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "corpus" / "a.parquet")
    records = [RECORDS] if kind == "jsonl" else []
    if not expected:
        with pytest.raises(UserError, match=r"source s: no text .* leave out 4 of 4 documents"):
            tokenised(records, kind=kind, filters=Filters(**filters))
        return
    found = tokenised(records, kind=kind, filters=Filters(**filters))
    assert contents(found) == [RECORDS[i]["text"] for i in expected]
    assert found.counts["left_out"] == 4 - len(expected)


_LOOP = "{% for m in messages %}"
CHATML = (
    _LOOP + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A turn is closed by the mark of the next role.
ROLES = (
    _LOOP + "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# An empty thought is put before the last answer.
THINKS = CHATML.replace(
    "m.content + '<",
    "(('<think>\\n\\n</think>\\n\\n' if loop.last and m.role == 'assistant' else '')"
    " + m.content) + '<",
)
MARKED = (
    _LOOP + "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
TALK = [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "two three"},
    {"role": "user", "content": "Four?"}, {"role": "assistant", "content": "five"},
]  # fmt: skip


def chat_tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def learnt(template: str, messages: list[dict[str, str]] = TALK) -> list[str]:
    """The text of each run of learnt tokens."""
    tokenizer = chat_tokenizer(template)
    signed = encode_conversation(tokenizer, Conversation(messages, "a"), True)
    ids = np.where(signed < 0, ~signed, signed).tolist()
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == rendered + "<|end|>"
    borders = [*(np.flatnonzero(np.diff(signed >= 0)) + 1).tolist(), len(ids)]
    parts = np.split(np.arange(len(ids)), borders[:-1])
    return [tokenizer.decode([ids[i] for i in part]) for part in parts if signed[part[0]] >= 0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["two three<|im_end|>", "five<|im_end|>"]),
        (MARKED, ["two three<|im_end|>", "five<|im_end|>"]),
        (ROLES, ["two three<|user|>", "five<|end|>"]),
    ],
)
def test_answers_are_learnt_with_the_token_that_ends_their_turn(
    template: str, expected: list[str]
) -> None:
    assert learnt(template) == expected
    signed = encode_conversation(chat_tokenizer(template), Conversation(TALK, "a"), False)
    assert (signed >= 0).all()


def test_an_empty_thought_of_the_template_is_given() -> None:
    assert learnt(THINKS, TALK[:2]) == ["two three<|im_end|>"]
    with pytest.raises(UserError, match="a: the tokens up to message 2 change"):
        learnt(THINKS)


def test_labels_are_stored_with_the_packed_data(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 600}))
    records: list[dict[str, Any]] = [
        {"messages": TALK}, {"prompt": "One?", "completion": "six"}, {"messages": TALK[:1]},
    ]  # fmt: skip
    file = tmp_path / "a.jsonl"

    def prepare(lines: list[dict[str, Any]], folder: str) -> Any:
        file.write_text("".join(json.dumps(record) + "\n" for record in lines))
        source = {"name": "a", "kind": "jsonl", "path": str(file), "loss": "completion"}
        section = PrepareConfig(sequence_length=16, train_tokens=160, sources=[source])
        config = StageConfig(section, ModelConfig(path=str(model)), 0, Runtime(data_workers=1))
        write_training_data(config, TokenizerSpec(str(model)), tmp_path / folder)
        return load_from_disk(str(tmp_path / folder / "train")).with_format("numpy")

    rows = list(prepare(records[:2], "two"))
    batch = collate(rows)
    ids, labels = (batch[name].flatten() for name in ("input_ids", "labels"))
    kept = labels >= 0
    assert (labels[kept] == ids[kept]).all() and set(labels[~kept].tolist()) == {-100}
    text = tokenizer.decode(labels[kept].tolist())
    assert set(text.split("<|im_end|>")) >= {"two three", "five", "six"}
    for bad, said in ((records[2], "no answer of the assistant"), ({"text": "x"}, "no messages")):
        with pytest.raises(UserError, match=rf"a\.jsonl, line 2: {said}"):
            prepare([records[0], bad], said[:5])
