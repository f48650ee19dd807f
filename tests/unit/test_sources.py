from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import os
import shutil
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from bosch.errors import RunError, UserError
from data_prep.documents import records, sources
from data_prep.documents.filters import Filters
from data_prep.documents.sources import KINDS, Source, list_parts, mds, read_part
from data_prep.text import BadRecord, TextFile, haystack_files
from tests.tiny_data import tiny_tokenizer


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


def test_kinds_with_fields_to_filter_by_and_kinds_of_the_hub(tmp_path):
    assert {name for name, kind in KINDS.items() if kind.has_fields} == {
        "csv", "huggingface", "jsonl", "parquet",
    }  # fmt: skip
    assert [name for name, kind in KINDS.items() if kind.is_remote("org/name")] == ["huggingface"]
    assert not any(kind.is_remote(str(tmp_path)) for kind in KINDS.values())


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
    for target in (elsewhere, folder, folder.parent, tmp_path):
        loop = elsewhere / "c" / "loop"
        loop.symlink_to(target)
        with pytest.raises(UserError, match=r"loop is a link to a folder that it lies in"):
            haystack_files(folder)
        loop.unlink()


TEXTS = [f"{'x' * (i % 7)} é {i}" for i in range(200)]


@pytest.mark.parametrize("part_bytes", [1, 100, 1_000_000])
def test_jsonl_is_read_once_for_any_number_of_parts(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(sources, "PART_BYTES", part_bytes)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS[:120]) + b"\n  \n")
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[120:]).rstrip(b"\n"))
    assert sorted(read(Source("s", "jsonl", str(tmp_path)))) == sorted(TEXTS)


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_compressed_jsonl_is_read(tmp_path, kind):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:100])))
    frames = zstd(lines(TEXTS[100:150])) + zstd(lines(TEXTS[150:]))
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    assert sorted(read(Source("s", kind, str(tmp_path)))) == sorted(TEXTS)


_SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json.gz", gzip.compress(lines(TEXTS))),
        (
            "a.jsonl.gz",
            gzip.compress(lines(TEXTS[:9])) + gzip.compress(lines(TEXTS[9:])) + bytes(99),
        ),
        ("a.jsonl.bz2", bz2.compress(lines(TEXTS))),
        ("a.ndjson.xz", lzma.compress(lines(TEXTS))),
        ("a.json.zst", _SKIPPABLE_FRAME + zstd(lines(TEXTS))),
        ("a.jsonl", gzip.compress(lines(TEXTS))),
        ("a.jsonl.gz", lines(TEXTS)),
        ("a.jsonl.zst", b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n\r\n")),
        ("a.csv", table(TEXTS)),
        ("a.csv.gz", gzip.compress(table(TEXTS))),
        ("a.tsv", b"\xef\xbb\xbf" + table(TEXTS, "\t")),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_content_decides_how_a_file_is_compressed(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    kind = "csv" if "sv" in name else "jsonl"
    assert sorted(read(Source("s", kind, str(tmp_path)))) == sorted(TEXTS)


def test_compressed_texts_are_read(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("\ufeffein Käfer".encode()))
    [file] = read(Source("s", "text", str(tmp_path)))
    assert "".join(file.pieces()) == "ein Käfer"


def test_a_zstd_file_of_a_large_window_is_to_be_decompressed_first(tmp_path):
    """Its header asks for a window of 2 GB (`zstd --long=31`), which Arrow does not decode."""
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(99))
    for kind in ("jsonl", "huggingface"):
        with pytest.raises(UserError, match=r"larger than 128 MB; decompress it with zstd -d --lo"):
            read(Source("s", kind, str(tmp_path)))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.jsonl", "a.parquet", "a.arrow"])
def test_records_are_no_texts(tmp_path, name):
    (tmp_path / "b.txt").write_text("one")
    (tmp_path / name).write_text("a,b")
    for attempt in (KINDS["text"].check, lambda path: read(Source("s", "text", path))):
        with pytest.raises(UserError, match=f"{name} holds records, not a text"):
            attempt(str(tmp_path))
    assert read(Source("s", "text", str(tmp_path / "*.txt"))) == ["one"]


def test_a_dataset_of_save_to_disk_is_read(tmp_path):
    data = Dataset.from_dict({"body": TEXTS})
    data.save_to_disk(tmp_path / "one", num_shards=3)
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    one, two = (Source("s", "huggingface", str(tmp_path / n), "body") for n in ("one", "two"))
    assert len(list(list_parts(one, 0, 128))) == 3
    assert sorted(read(one)) == sorted(read(two)) == sorted(TEXTS)
    assert read(replace(two, split="test")) == TEXTS[:1]
    with pytest.raises(UserError, match=r"cannot be read \(it has the splits train, test\)"):
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
    with pytest.raises(UserError, match=r"(line 2|row 1|record 1): field `text` is null, not text"):
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


def test_the_index_of_an_mds_source_is_read_once(tmp_path, monkeypatch):
    tiny_tokenizer().save_pretrained(tmp_path)
    times = []
    read_index = mds.read_index
    monkeypatch.setattr(mds, "read_index", lambda path: times.append(path) or read_index(path))
    source = Source("s", "mds", "tests/data/mds/packed_zstd", tokenizer=str(tmp_path))
    assert len(read(source)) == 18 and len(times) == 1


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
LONG = zstd(lines([text * 50 for text in TEXTS]))
DAMAGED = {
    "jsonl": [
        ("a.jsonl", lines(["x"]) + b'{"text": "unfin', r"a\.jsonl, line 2: .* ends inside it"),
        ("a.jsonl", lines(["x", "y"]) + b"{oops}\n", r"a\.jsonl, line 3: not a complete JSON"),
        ("a.jsonl", lines(["x"]) + b'{"body": "y"}\n', r"line 2: no field `text` \(there is body"),
        ("a.jsonl", b'{"text": null}\n', "line 1: field `text` is null, not text"),
        ("a.jsonl", b"[1]\n", "line 1: expected an object, not a list"),
        (
            "a.jsonl",
            lines(["x"]) + b'{"text": "\xff"}\n',
            r"a\.jsonl, line 2: .* .invalid unicode code point at byte 11",
        ),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS))[:-30], r"l\.gz: cannot be read to its end"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz, line 1: not a complete JSON"),
        (
            "a.json.bz2",
            bz2.compress(lines(TEXTS))[:-30],
            r"a\.json\.bz2: cannot be read to its end",
        ),
        (
            "a.jsonl.xz",
            lzma.compress(lines(TEXTS))[:-30],
            r"a\.jsonl\.xz: cannot be read to its end",
        ),
        ("a.jsonl.zst", LONG[: len(LONG) // 2], r"a\.jsonl\.zst: cannot be read to its end"),
        ("a.jsonl", lines(["x"]) + b'{"text": "a\\ud800b"}\n', "line 2: .* hex escape at byte 18"),
        ("a.jsonl", lines(["x"]) + b"[" * 100_000 + b"\n", "line 2: .*recursion limit"),
        ("a.jsonl", b'{"text": "a\x00b"}\n', "line 1: not a complete JSON record .control char"),
        ("a.txt", b"", "the folder .* holds no .jsonl"),
    ],
    "parquet": [
        ("a.parquet", WHOLE[:-100], r"a\.parquet: not a whole Parquet file"),
        ("a.parquet", WHOLE[:4] + b"\xff" * 196 + WHOLE[200:], r"a\.parquet, row group 0"),
        ("a.parquet", parquet(a=["x"], n=[1]), r"no column `text` \(there is a, n\)"),
        (
            "a.parquet",
            parquet(text=[[{"role": "user"}]]),
            r"a\.parquet: column `text` is of type list<.*>, not text",
        ),
        ("a.parquet", parquet(text=[1]), "row 0: field `text` is of type int, not text"),
    ],
    "csv": [
        ("a.csv", b"a,b\nx,y\n", r"a\.csv, line 2: no field `text` .there is a, b."),
        ("a.csv", b'text,b\nx\n"y\nz",1,2\n', r"a\.csv, line 4: more values than the first line"),
        ("a.csv", b"n,text\n1\n", r"a\.csv, line 2: field `text` is null"),
        ("a.csv", b'text\n"x', r"a\.csv, after line 1: no table of UTF-8 text"),
        ("a.csv", b"text\n\xff\n", r"a\.csv, after line 1: no table of UTF-8 text"),
    ],
    "huggingface": [
        ("a.jsonl", lines(["x"]) + b'{"text": null}\n', "shard 0, record 1: field `text` is null"),
        ("a.jsonl", lines(["x"], "body"), "shard 0, record 0: no field `text` .there is body"),
        ("a.jsonl", b"{oops", "source s: dataset .* cannot be read"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [(kind, *row) for kind, rows in DAMAGED.items() for row in rows],
    # By name, not by content: gzip stores the time, so two pytest workers would differ in test ids.
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_damaged_source_is_reported(tmp_path, kind, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(Source("s", kind, str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part_bytes", [700, 5000])
def test_a_record_of_exactly_the_maximum_size_is_read(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(sources, "PART_BYTES", part_bytes)
    text = "y" * (1000 - len(lines([""])))
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(["x", text, "z"]))
    assert sorted(read(Source("s", "jsonl", str(file)))) == ["x", text, "z"]
    file.write_bytes(lines(["x", text + "y", "z"]))
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: a record of more than"):
        read(Source("s", "jsonl", str(file)))


def test_rows_of_parquet_are_read_in_batches_of_16_mb(tmp_path, monkeypatch):
    sizes = []
    batches = pq.ParquetFile.iter_batches

    def noted(self, batch_size, **options):
        sizes.append(batch_size)
        return batches(self, batch_size, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    for length in (2**20, 10):
        texts = [str(number) * length for number in range(8)]
        pq.write_table(
            pa.table({"other": ["x" * 2**22] * 8, "text": texts}), tmp_path / "a.parquet"
        )
        assert sorted(read(Source("s", "parquet", str(tmp_path / "a.parquet")))) == texts
    assert sizes == [15, 1000]


def test_line_numbers_in_later_parts_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 50)
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


def test_a_dataset_directory_of_several_files_is_read(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(TEXTS[number * 50 : number * 50 + 50]))
    source = Source("s", "huggingface", str(tmp_path))
    assert len(list(list_parts(source, 0, 128))) == 3
    assert sorted(read(source)) == sorted(TEXTS[:150])


@pytest.mark.parametrize(("split", "subset"), [("test", None), ("train", "other")])
def test_an_unknown_split_or_subset_is_refused(tmp_path, split, subset):
    (tmp_path / "train.jsonl").write_bytes(lines(["x"]))
    with pytest.raises(UserError, match=r"source s: dataset .*cannot be read \("):
        read(Source("s", "huggingface", str(tmp_path), split=split, subset=subset))


def test_a_dataset_of_the_hub_is_read_at_its_revision(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **b: opened.append((*a, b["revision"])))
    for path in ("org/name", str(tmp_path)):
        records.open_dataset("source s", path, "sub", "test", "abc")
    assert opened == [("org/name", "sub", "abc"), (str(tmp_path), "sub", None)]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left .*models'$"),
        (ConnectionError("refused"), RunError, r"cannot be reached \(refused\); run again"),
        (TimeoutError("timed out"), RunError, r"cannot be reached \(timed out\); run again"),
        (ValueError("no split"), UserError, r"dataset org/name: cannot be read \(no split\)"),
    ],
)
def test_failures_to_read_a_dataset_of_the_hub_are_explained(monkeypatch, error, raised, message):
    def load(*args, **options):
        raise error

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(raised, match=message):
        records.open_dataset("source s", "org/name", None, type(error).__name__, None)


def test_texts_of_parquet_are_decoded_once(tmp_path):
    """Arrow gives every batch the texts of all earlier rows; kept, the last one would hold all."""
    texts = [f"{number:06d}" * 500 for number in range(4000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    [part] = list_parts(source := Source("s", "parquet", str(tmp_path)), 0, 128)
    tracemalloc.start()
    try:
        assert all(text == read for text, read in zip(texts, read_part(part, source), strict=True))
        # Two batches of 1,000 rows, 3 MB each.
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pattern", ["", "*.txt"])
@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to("gone"), "is a link that leads nowhere"),
        (lambda path: path.symlink_to(path.name), "is a link that leads nowhere"),
    ],
)
def test_an_unreadable_file_of_a_source_is_refused(tmp_path, harm, what, pattern):
    (tmp_path / "a.txt").write_text("one")
    harm(tmp_path / "b.txt")
    with pytest.raises(UserError, match=rf"b\.txt {what}.*; remove it"):
        KINDS["text"].check(str(tmp_path / pattern))


def test_a_folder_that_cannot_be_listed_is_reported(tmp_path, monkeypatch):
    for path in (tmp_path / "a.txt", tmp_path / "sub" / "b.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("one")
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"sub cannot be listed \(Permission denied\)"):
        KINDS["text"].check(str(tmp_path))


def test_a_damaged_index_is_reported(tmp_path):
    (tmp_path / "index.json").write_bytes(b"{")
    with pytest.raises(UserError, match="not an index of MDS shards"):
        KINDS["mds"].check(str(tmp_path))


@pytest.mark.parametrize("piece", [1, 2, 5, 1000])
def test_a_long_text_file_is_read_in_pieces(tmp_path, monkeypatch, piece):
    """A character may span two pieces, and an error names its byte in the file."""
    monkeypatch.setattr("data_prep.text.PIECE_BYTES", piece)
    path, text = tmp_path / "a.txt", "ein Käfer, 甲虫 und 🪲\n" * 3
    path.write_bytes(text.encode("utf-8-sig"))
    assert "".join(TextFile(path).pieces()) == text
    whole = path.read_bytes()
    for content, place in ((whole + b"\xff", len(whole)), (whole[:-2], len(whole) - 5)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"not UTF-8 at byte {place} "):
            list(TextFile(path).pieces())


def test_no_part_reads_a_huge_record_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 1000)
    for start in (0, 50, 500):
        with pytest.raises(UserError, match="line 1: a record of more than"):
            next(records.read_jsonl(path, start, 1000, "text", Filters()))
