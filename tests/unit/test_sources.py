from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import shutil
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from bosch.errors import RunError, UserError
from data_prep.documents.sources import (
    KINDS,
    BadRecord,
    Filters,
    Source,
    files,
    list_parts,
    read_part,
)
from data_prep.text import haystack_files


def read(source: Source, seed: int = 0) -> list[str | None]:
    """All texts; raises UserError at the first bad record."""
    texts = []
    for part in list_parts(source, seed, 128):
        for text in read_part(part, source):
            if isinstance(text, BadRecord):
                raise UserError(text.fault)
            texts.append(text)
    return texts


def lines(texts, field="text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)


def table(texts, delimiter: str = ",") -> bytes:
    file = io.StringIO()
    rows = csv.writer(file, delimiter=delimiter)
    rows.writerows([["n", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def test_text_sources_are_a_folder_a_file_or_a_glob(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b" / "c.txt").write_text("\ufefftwo")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("three")
    assert read(Source("s", "text", str(tmp_path))) == ["one", "two"]
    assert read(Source("s", "text", str(tmp_path / "a.txt"))) == ["one"]
    assert read(Source("s", "text", str(tmp_path / "**" / "c*.txt"))) == ["two"]
    assert read(Source("s", "text", str(tmp_path / "**" / "*.txt"))) == ["one", "two"]


def test_linked_folders_are_read(tmp_path):
    """By a source, and among the essays of a haystack."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "here" / "texts"
    (elsewhere / "c").mkdir(parents=True)
    (elsewhere / "c" / "a.txt").write_text("one")
    folder.mkdir(parents=True)
    for name in ("b", "d"):
        (folder / name).symlink_to(elsewhere)
    linked = [folder / name / "c" / "a.txt" for name in ("b", "d")]
    assert KINDS["text"].files("prepare", str(folder)) == haystack_files(folder) == linked
    (folder / "e.txt").symlink_to("gone")
    with pytest.raises(UserError, match=r"e\.txt is a link that leads nowhere"):
        haystack_files(folder)


TEXTS = [f"{'x' * (i % 7)} é {i}" for i in range(200)]


@pytest.mark.parametrize("part_bytes", [1, 100])
def test_jsonl_is_read_once_for_any_number_of_parts(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(files, "PART_BYTES", part_bytes)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:120]) + b"\n  \n")
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[120:]).rstrip(b"\n"))
    assert sorted(read(Source("s", "jsonl", str(tmp_path)))) == sorted(TEXTS)


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_each_file_of_a_folder_is_a_part(tmp_path, kind):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:100])))
    frames = zstd(lines(TEXTS[100:150])) + zstd(lines(TEXTS[150:170]))
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS[170:]))
    source = Source("s", kind, str(tmp_path))
    assert len(list(list_parts(source, 0, 128))) == 3
    assert sorted(read(source)) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json.gz", gzip.compress(lines(TEXTS[:9])) + gzip.compress(lines(TEXTS[9:]))),
        ("a.jsonl.bz2", bz2.compress(lines(TEXTS))),
        ("a.ndjson.xz", lzma.compress(lines(TEXTS))),
        ("a.jsonl.zst", zstd(b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n\r\n"))),
        ("a.jsonl", gzip.compress(lines(TEXTS))),  # by its content, whatever its name
        ("a.csv", table(TEXTS)),
        ("a.tsv.gz", gzip.compress(b"\xef\xbb\xbf" + table(TEXTS, "\t"))),
        ("a.txt.xz", lzma.compress("\ufeffein Käfer".encode())),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_compressed_files_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    kind = "csv" if "sv" in name else "text" if "txt" in name else "jsonl"
    expected = ["ein Käfer"] if kind == "text" else sorted(TEXTS)
    assert sorted(read(Source("s", kind, str(tmp_path)))) == expected


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
    assert len(list(list_parts(one, 0, 128))) == 3
    assert sorted(read(one)) == sorted(read(two)) == sorted(TEXTS)
    assert read(replace(two, split="test")) == TEXTS[:1]
    with pytest.raises(UserError, match=r"source s: dataset .* cannot be read"):
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


def test_row_groups_of_parquet_are_read(tmp_path):
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet", row_group_size=30)
    source = Source("s", "parquet", str(tmp_path), text_field="body")
    assert len(list(list_parts(source, 0, 128))) == 7
    assert sorted(read(source)) == sorted(TEXTS)


def test_python_docs_are_the_library_and_its_help():
    texts = read(Source("s", "python_docs"))
    assert len(texts) > 300
    assert any("class JSONDecoder" in text for text in texts)
    assert any(text.startswith('The "assert" statement') for text in texts)


def test_files_of_the_library_that_are_not_text_are_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    source = Source("docs", "python_docs")
    with pytest.raises(UserError, match=f"source docs: .* source is not in {tmp_path}"):
        read(source)
    contents = {"a.py": b"a = 1\n", "no_text.py": b"\xff", "no_encoding.py": b"# coding: none\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert "a = 1\n" in read(source)
    assert sorted(record.args[1].name for record in caplog.records) == [
        "no_encoding.py", "no_text.py",
    ]  # fmt: skip


def test_the_order_of_parts_is_random():
    source = Source("s", "python_docs")
    first, again, other = (list(list_parts(source, seed, 128)) for seed in (0, 0, 1))
    assert first == again != other
    assert set(first) == set(other)


def test_retrieval_documents_are_endless_and_depend_on_the_seed():
    source = Source("s", "retrieval")
    parts = list_parts(source, 0, 128)
    first, second = next(parts), next(parts)
    texts = list(read_part(first, source))
    assert texts == list(read_part(first, source)) != list(read_part(second, source))
    assert next(list_parts(source, 1, 128)) != first
    longer = list(read_part(next(list_parts(source, 0, 4096)), source))
    assert len(texts) == len(longer) == 256
    for made, longest in ((texts, 4000), (longer, 8192)):
        lengths = [len(text) for text in made]
        assert 400 < min(lengths) < 800 and 0.95 * longest < max(lengths) < 1.1 * longest


def test_a_merged_index_is_read_instead_of_those_below_it(tmp_path):
    shutil.copytree("tests/data/mds/plain", tmp_path / "sub")
    merged = json.loads((tmp_path / "sub" / "index.json").read_text())
    for shard in merged["shards"]:
        shard["raw_data"]["basename"] = f"sub/{shard['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps(merged))
    parts = list(list_parts(Source("s", "mds", str(tmp_path), tokenizer="x"), 0, 128))
    assert [part.paths for part in parts] == [(tmp_path,)] * len(merged["shards"])


def test_a_missing_shard_is_reported_before_any_is_read(tmp_path):
    folder = shutil.copytree("tests/data/mds/plain", tmp_path / "a")
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(UserError, match=r"shard\.00001\.mds: this shard is in index\.json"):
        list(list_parts(Source("s", "mds", str(folder), tokenizer="x"), 0, 128))


def parquet(**columns) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


WHOLE = parquet(text=TEXTS)
DAMAGED = [
    (
        "jsonl",
        "a.jsonl",
        lines(["x"]) + b'{"text": "unfin',
        r"a\.jsonl, line 2: not a complete JSON",
    ),
    (
        "jsonl",
        "a.jsonl",
        lines(["x"]) + b'{"body": "y"}\n',
        r"line 2: no field `text` \(there is body",
    ),
    ("jsonl", "a.jsonl", b"[1]\n", r"line 1: expected an object, found \[1\]"),
    ("jsonl", "a.jsonl.gz", gzip.compress(lines(TEXTS))[:-30], r"source s: .*l\.gz cannot be read"),
    ("jsonl", "a.txt", b"", "the folder .* holds no .jsonl"),
    ("parquet", "a.parquet", WHOLE[:-100], r"a\.parquet: not a whole Parquet file"),
    ("parquet", "a.parquet", WHOLE[:4] + b"\xff" * 196 + WHOLE[200:], r"a\.parquet cannot be read"),
    ("parquet", "a.parquet", parquet(a=["x"], n=[1]), r"row 0: no field `text` \(there is a, n\)"),
    ("parquet", "a.parquet", parquet(text=[1]), "row 0: field `text` is 1, not text"),
    ("csv", "a.csv", b"a,b\nx,y\n", r"a\.csv, line 2: no field `text` .there is a, b."),
    ("csv", "a.csv", b'text\n"x', r"a\.csv cannot be read"),
    ("huggingface", "a.jsonl", lines(["x"], "body"), "record 0: no field `text` .there is body"),
    ("huggingface", "a.jsonl", b"{oops", "source s: .* cannot be read"),
    ("mds", "index.json", b"{", "not an index of MDS shards"),
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


def test_line_numbers_in_later_parts_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) + b"broken\n")
    with pytest.raises(UserError, match="line 201:"):
        read(Source("s", "jsonl", str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("text", "nowhere", "source s: .* names no file; expected"),
        ("text", "*.nothing", "source s: .* names no file; expected"),
        ("mds", "", r"source s: there is no index\.json"),
    ],
)
def test_a_source_without_files_is_refused(tmp_path, kind, path, message):
    with pytest.raises(UserError, match=message):
        read(Source("s", kind, str(tmp_path / path), tokenizer="x"))


@pytest.mark.parametrize(("split", "subset"), [("test", None), ("train", "other")])
def test_an_unknown_split_or_subset_is_refused(tmp_path, split, subset):
    (tmp_path / "train.jsonl").write_bytes(lines(["x"]))
    with pytest.raises(UserError, match=r"source s: dataset .*cannot be read \("):
        read(Source("s", "huggingface", str(tmp_path), split=split, subset=subset))


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left .*models'$"),
        (ConnectionError("refused"), RunError, r"cannot be reached \(refused\); run again"),
        (ValueError("no split"), UserError, r"dataset org/name: cannot be read \(no split\)"),
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
        list(list_parts(source, 0, 128))
    assert opened == [("org/name", "sub", "abc")]


def test_texts_of_parquet_are_decoded_once(tmp_path):
    """Arrow gives every batch the texts of all earlier rows; kept, the last one would hold all."""
    texts = [f"{number:06d}" * 500 for number in range(4000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    [part] = list_parts(source := Source("s", "parquet", str(tmp_path)), 0, 128)
    tracemalloc.start()
    try:
        assert all(text == read for text, read in zip(texts, read_part(part, source), strict=True))
        # Two batches of 16 rows.
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
