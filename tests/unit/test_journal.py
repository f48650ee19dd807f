"""A torn or damaged journal keeps all other entries and counts what it lost."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import operator
import zlib
from pathlib import Path

import pytest

from bosch.errors import RunError
from bosch.journal import Journal

ENTRIES = [
    {"step": 1, "loss": 0.5},
    {"text": 'new\nlines, "quotes", {"braces": 1}, \u00e4\u2028 and "crc32": "'},
    {},
    {"deep": {"list": [1, None, True], "crc32": "00000000"}},
]
NEW = {"step": 9}


def written(path: Path) -> bytes:
    Journal(path).append(*ENTRIES)
    return path.read_bytes()


def test_entries_come_back_and_lines_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    lines = written(path).decode().splitlines()
    assert Journal(path).read_new(dict) == ENTRIES
    for line, entry in zip(lines, ENTRIES, strict=True):
        fields = json.loads(line)
        assert len(fields.pop("crc32")) == 8
        assert fields == entry


def test_a_file_torn_at_any_byte_keeps_the_entries_before(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    content = written(path)
    ends = [end for end, byte in enumerate(content, start=1) if byte == ord("\n")]
    for size in range(len(content)):
        path.write_bytes(content[:size])
        whole = ENTRIES[: sum(end <= size for end in ends)]
        follower = Journal(path)
        assert follower.read_new(dict) == whole
        Journal(path).append(NEW)
        assert follower.read_new(dict) == [NEW]
        reader = Journal(path)
        assert reader.read_new(dict) == [*whole, NEW]
        assert follower.damaged == reader.damaged == 0


@pytest.mark.parametrize("change", [lambda byte: byte ^ 1, lambda byte: 0, lambda byte: 255])
def test_a_damaged_byte_loses_only_its_own_line(tmp_path: Path, change) -> None:
    path = tmp_path / "journal.jsonl"
    content = written(path)
    for place in range(len(content) - 1):  # without the last line feed a file is torn
        path.write_bytes(content[:place] + bytes([change(content[place])]) + content[place + 1 :])
        Journal(path).append(NEW)
        damaged = content[:place].count(b"\n")
        reader = Journal(path)
        assert reader.read_new(dict) == [*ENTRIES[:damaged], *ENTRIES[damaged + 1 :], NEW]
        assert reader.damaged == 1


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    content = written(path)
    for before in (content, b""):
        path.write_bytes(before + b"x" * 200_000)
        Journal(path).append(NEW)
        assert path.read_bytes().startswith(before)
        assert len(path.read_bytes()) < len(before) + 100


def _append_many(path: Path, writer: int) -> None:
    journal = Journal(path)
    for number in range(50):
        journal.append({"writer": writer, "number": number, "filling": "x" * 200})


def test_writers_at_the_same_time_lose_no_entry_and_a_reader_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, i)) for i in range(3)]
    follower = Journal(path)
    entries = []
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        entries += follower.read_new(dict)
    entries += follower.read_new(dict)
    pairs = [(entry["writer"], entry["number"]) for entry in entries]
    assert sorted(pairs) == [(i, n) for i in range(3) for n in range(50)]
    assert all(sorted(own) == own for i in range(3) for own in [[n for w, n in pairs if w == i]])
    assert follower.damaged == 0
    assert Journal(path).read_new(dict) == entries


def test_an_append_waits_for_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(file: object, operation: int) -> None:
        fcntl_flock(file, operation | fcntl.LOCK_NB)

    path = tmp_path / "journal.jsonl"
    content, fcntl_flock = written(path), fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)  # fails at once instead of waiting
    with path.open() as other:
        fcntl_flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="cannot be written"):
            Journal(path).append(NEW)
        assert path.read_bytes() == content
    Journal(path).append(NEW)
    assert path.read_bytes() > content


def test_replaced_entries_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    journal = Journal(path)
    journal.replace(journal.read_new(dict)[:2])
    journal.append(NEW)
    assert journal.read_new(dict) == [NEW]
    assert Journal(path).read_new(dict) == [*ENTRIES[:2], NEW]


def test_a_file_that_cannot_be_written_or_read_raises_run_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal.jsonl").append({})
    with pytest.raises(RunError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal.jsonl").replace([{}])
    with pytest.raises(RunError, match="cannot be read"):
        Journal(tmp_path).read_new(dict)


def test_a_complete_line_of_another_kind_is_damaged(tmp_path: Path) -> None:
    """Its checksum matches, but it is no JSON, or lacks the expected fields."""
    path = tmp_path / "journal.jsonl"
    Journal(path).append({"step": 1}, {"stop": 2}, {"step": [3]}, {"step": 4})
    for text in (b'{"step": ', b'{"step": 1} ', b'{"step": ' + b"[" * 100_000):
        head = text + b', "crc32": "'
        with path.open("ab") as file:
            file.write(head + f'{zlib.crc32(head):08x}"}}\n'.encode())
    journal = Journal(path)
    assert journal.read_new(lambda entry: operator.index(entry["step"])) == [1, 4]
    assert journal.damaged == 5
