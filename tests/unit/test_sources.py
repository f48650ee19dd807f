from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import itertools
import json
import lzma
import tracemalloc
from dataclasses import replace
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from bosch.errors import RunError, UserError
from data_prep.documents.retrieval import (
    Document,
    Segment,
    key_value_list,
    needle_document,
    repeated_spans,
    retrieval_document,
    retrieval_documents,
    two_hops,
)
from data_prep.documents.sources import KINDS, Filters, Source, documents
from data_prep.text import haystack_words
from recipes.quickstart.training_rows import FIRST_ANSWER_WEIGHT, PROMPT_WEIGHT, Rows
from tests.ruler_case import TOKENIZER, essay_text


def read(source: Source) -> list:
    return list(documents(source))


def lines(texts, field="text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def test_text_sources_are_a_folder_a_file_or_a_glob(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b" / "c.txt").write_text("\ufefftwo")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("three")
    for place, texts in (("", "one two"), ("a.txt", "one"), ("**/c*.txt", "two")):
        assert sorted(read(Source("s", "text", str(tmp_path / place)))) == texts.split()


def test_linked_folders_are_read(tmp_path):
    """By a source, and among the essays of a haystack."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "here" / "texts"
    (elsewhere / "c").mkdir(parents=True)
    (elsewhere / "c" / "a.txt").write_text("one")
    folder.mkdir(parents=True)
    for name in ("b", "d"):
        (folder / name).symlink_to(elsewhere)
    linked = [folder / name / "c" / "a.txt" for name in ("b", "d")]
    assert KINDS["text"].files("prepare", str(folder)) == linked
    assert haystack_words(folder) == ["one", "one"]
    (folder / "e.txt").symlink_to("gone")
    with pytest.raises(UserError, match=r"e\.txt is a link that leads nowhere"):
        haystack_words(folder)


TEXTS = [f"{'x' * (i % 7)} é {i}" for i in range(200)]


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_files_are_read_in_an_order_of_the_seed(tmp_path, kind):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:100])))
    frames = zstd(lines(TEXTS[100:150])) + zstd(lines(TEXTS[150:170]))
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS[170:]).rstrip(b"\n"))
    orders = [read(Source("s", kind, str(tmp_path), seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert orders[0] == orders[1] and len({order[0] for order in orders}) > 1
    assert all(sorted(order) == sorted(TEXTS) for order in orders)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json.gz", gzip.compress(lines(TEXTS[:9])) + gzip.compress(lines(TEXTS[9:]))),
        ("a[1]*.jsonl.bz2", bz2.compress(lines(TEXTS))),
        ("a.ndjson.xz", lzma.compress(lines(TEXTS))),
        ("a.jsonl.zst", zstd(b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n \r\n"))),
        ("a.txt.xz", lzma.compress("\ufeffein Käfer".encode())),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_compressed_files_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    is_text = "txt" in name
    texts = read(Source("s", "text" if is_text else "jsonl", str(tmp_path)))
    assert texts == (["ein Käfer"] if is_text else TEXTS)


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.parquet"])
def test_records_are_no_texts(tmp_path, name):
    (tmp_path / "b.txt").write_text("one")
    (tmp_path / name).write_text("a,b")
    with pytest.raises(UserError, match=f"{name} holds records, not a text"):
        read(Source("s", "text", str(tmp_path)))
    assert read(Source("s", "text", str(tmp_path / "*.txt"))) == ["one"]


def test_a_dataset_of_save_to_disk_is_read(tmp_path):
    data = Dataset.from_dict({"body": TEXTS})
    data.save_to_disk(tmp_path / "one", num_shards=3)
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    one, two = (Source("s", "huggingface", str(tmp_path / n), "body") for n in ("one", "two"))
    assert sorted(read(one)) == sorted(read(two)) == sorted(TEXTS)
    assert read(replace(two, split="test")) == TEXTS[:1]
    with pytest.raises(UserError, match=r"source s: .*/two cannot be read"):
        read(replace(two, split="validation"))


BAD = [{"text": "one", "n": "1"}, {"text": None, "n": "2"}, {"n": "3"}, {"text": "two", "n": "4"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "huggingface"])
def test_records_are_filtered_before_their_text_is_checked(tmp_path, kind):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in BAD))
    if kind == "parquet":
        (tmp_path / "a.jsonl").unlink()
        pq.write_table(pa.Table.from_pylist(BAD), tmp_path / "a.parquet")
    for matches, expected in (
        ({"text": "."}, ["one", None, None, "two"]),
        ({"n": "1|4"}, ["one", None, None, "two"]),
    ):
        source = Source("s", kind, str(tmp_path), filters=Filters(matches=matches))
        assert read(source) == expected
    with pytest.raises(UserError, match=r"(line 2|row 1|record 1): field `text` is None, not text"):
        read(replace(source, filters=Filters()))


def test_python_docs_are_the_library_and_its_help():
    texts = read(Source("s", "python_docs"))
    assert len(texts) > 300
    assert any("class JSONDecoder" in text for text in texts)
    assert any(text.startswith('The "assert" statement') for text in texts)


def test_a_python_without_its_library_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=f"source docs: .* source is not in {tmp_path}"):
        read(Source("docs", "python_docs"))


def test_retrieval_documents_are_endless_and_depend_on_the_seed():
    source = Source("s", "retrieval", sequence_length=128)
    texts, again, other, longer = (
        list(itertools.islice(documents(one), 256))
        for one in (source, source, replace(source, seed=1), replace(source, sequence_length=4096))
    )
    assert texts == again != other
    for made, longest in ((texts, 4000), (longer, 8192)):
        lengths = [len(text) for text in made]
        assert 400 < min(lengths) < 800 and 0.95 * longest < max(lengths) < 1.1 * longest


def parquet(**columns) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


WHOLE = parquet(text=TEXTS)
DAMAGED = [
    ("jsonl", "a.jsonl", lines(["x"]) + b'{"text": "un', r"a\.jsonl, line 2: not a complete JSON"),
    ("jsonl", "a.jsonl", lines(["x"]) + b'{"body": 1}', r"line 2: no field `text` \(there is body"),
    ("jsonl", "a.jsonl", b"[1]\n", r"line 1: expected an object, found \[1\]"),
    ("jsonl", "a.jsonl.gz", gzip.compress(lines(TEXTS))[:-30], r"source s: .*l\.gz cannot be read"),
    ("jsonl", "a.txt", b"", "the folder .* holds no .jsonl"),
    ("parquet", "a.parquet", WHOLE[:-100], r"a\.parquet cannot be read"),
    ("parquet", "a.parquet", WHOLE[:4] + b"\xff" * 196 + WHOLE[200:], r"a\.parquet cannot be read"),
    ("parquet", "a.parquet", parquet(a=["x"], n=[1]), r"row 0: no field `text` \(there is a, n\)"),
    ("parquet", "a.parquet", parquet(text=[1]), "row 0: field `text` is 1, not text"),
    ("huggingface", "a.jsonl", lines(["x"], "body"), "record 0: no field `text` .there is body"),
    ("huggingface", "a.jsonl", b"{oops", "source s: .* cannot be read"),
    ("mds", "index.json", b"{", "not an index of MDS shards"),
    ("mds", "a.txt", b"", r"source s: the folder .* holds no index\.json"),
    ("text", "a.txt", b"a\xff", r"a\.txt: not UTF-8 at byte 1"),
]


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    DAMAGED,
    # By name, not by content: gzip stores the time, so two pytest workers would differ in test ids.
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_damaged_source_is_reported(tmp_path, kind, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(Source("s", kind, str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["nowhere", "*.nothing"])
def test_a_source_without_files_is_refused(tmp_path, path):
    with pytest.raises(UserError, match=r"source s: .* names no file; expected"):
        read(Source("s", "text", str(tmp_path / path)))


@pytest.mark.parametrize(("split", "subset"), [("test", None), ("train", "other")])
def test_an_unknown_split_or_subset_is_refused(tmp_path, split, subset):
    (tmp_path / "train.jsonl").write_bytes(lines(["x"]))
    with pytest.raises(UserError, match=r"source s: .* cannot be read \("):
        read(Source("s", "huggingface", str(tmp_path), split=split, subset=subset))


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left .*models'$"),
        (ConnectionError("refused"), RunError, r"cannot be reached \(refused\); run again"),
        (ValueError("no split"), UserError, r"source s: org/name cannot be read \(no split\)"),
    ],
)
def test_failures_to_read_a_dataset_of_the_hub_are_explained(monkeypatch, error, raised, message):
    opened = []

    def load(*names, revision, **options):
        opened.append((*names, revision))
        raise error

    monkeypatch.setattr("datasets.load_dataset", load)
    source = Source("s", "huggingface", "org/name", subset="sub", split="x", revision="abc")
    with pytest.raises(raised, match=message):
        read(source)
    assert opened == [("org/name", "sub", "abc")]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_is_read_piece_by_piece(tmp_path, kind):
    """A batch of Parquet that is kept would hold the texts of all later ones."""
    texts = [f"{number:06d}" * 500 for number in range(4000)]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_bytes(lines(texts))
    source = Source("s", kind, str(tmp_path))
    next(documents(source))  # imports
    tracemalloc.start()
    try:
        assert all(text == read for text, read in zip(texts, documents(source), strict=True))
        assert tracemalloc.get_traced_memory()[1] < 1e6  # of 12 MB
    finally:
        tracemalloc.stop()


PROSE = essay_text(2000).split()
GENERATORS = {
    "list": key_value_list,
    "needle": needle_document,
    "repeat": repeated_spans,
    "hops": two_hops,
}
# Of forty documents of each kind. If digests change, training data does: raise prepare's version.
DIGESTS = {
    "list": "94799c19225de6a4",
    "needle": "981bef0dd50bde59",
    "repeat": "357ca545a484598b",
    "hops": "9f6fb715d612ac5b",
    "stream": "e1fc114c6a0c1c32",
}


def generated(kind: str) -> list[Document]:
    return [
        GENERATORS[kind](Random(seed), characters, PROSE)
        for seed in range(10)
        for characters in (200, 500, 1500, 4000)
    ]


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_seed_still_makes_the_same_documents(kind: str) -> None:
    content = repr([list(map(tuple, document)) for document in generated(kind)])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", range(4))
def test_a_document_has_about_the_requested_length(kind: int) -> None:
    prose = [f"word{number}" for number in range(5000)]
    weights = [float(number == kind) for number in range(4)]
    for seed in range(20):
        document = retrieval_document(Random(seed), 4000, prose, weights)
        assert 0.98 <= sum(len(segment.text) for segment in document) / 4000 <= 1.06
        earlier = ""
        for segment in document:  # the answer occurs earlier, whole or line by line
            assert not segment.is_answer or set(segment.text.split()) <= set(_words(earlier))
            earlier += segment.text


def test_hops_of_a_long_document_lead_to_one_answer() -> None:
    lines = "".join(segment.text for segment in two_hops(Random(0), 100_000, PROSE)).splitlines()
    keys = [line.split()[0] for line in lines if " holds " in line or " points to " in line]
    assert len(keys) == len({*keys}) > 1000


def test_weights_of_a_training_row_are_at_their_tokens() -> None:
    """Also after an answer without text."""
    rows = Rows(AutoTokenizer.from_pretrained(TOKENIZER), ["text"], PROSE)
    document = [Segment("a"), Segment("", True), Segment("b"), Segment("c", True)]
    ids, weights = rows.document(document)
    at = PROMPT_WEIGHT
    assert weights == [at, at, FIRST_ANSWER_WEIGHT, 0.1] and len(ids) == 4


def _words(text: str) -> list[str]:
    return text.replace(".", " ").replace(";", " ").replace("|", " ").replace(",", " ").split()


def test_a_stream_is_determined_by_seed_and_mixture() -> None:
    """Eight in ten ask for needles; lengths of all documents are between the two ends."""
    stream = list(itertools.islice(retrieval_documents(3, PROSE, (500, 4000)), 200))
    digest = hashlib.sha256("\0".join(stream).encode()).hexdigest()
    assert digest[:16] == DIGESTS["stream"]
    assert sum("magic" in text for text in stream) == pytest.approx(160, abs=15)
    short = itertools.islice(retrieval_documents(4, PROSE, (600, 700)), 30)
    assert all(500 < len(text) < 900 for text in short)
