"""Damaged data files: each is read, or refused in one sentence, within time and memory.

    pytest tests/unit/test_data_fuzz.py
    FUZZ_SECONDS=600 FUZZ_SEED=7 pytest -s tests/unit/test_data_fuzz.py

A small input of each kind is changed in a few bytes, cut, or has a piece repeated, with the seed
and the number that a failure names. A child process reads them, so that a crash inside a library
(a segmentation fault, an endless loop, all memory) fails the test and does not end it.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bosch.errors import UserError
from data_prep.documents import tokenizer
from data_prep.documents.filters import Filters
from data_prep.documents.sources import Source, list_parts, read_part
from data_prep.text import TextFile

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.25"))  # for each kind
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_MEMORY = 3 * 2**30
_SLOWEST = 10.0  # seconds of processor time for one input

TEXTS = [f"{'word ' * (i % 5)}é 日本 {i}" for i in range(30)]
KINDS = ("text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "mds", "mds_zstd", "mds_dynamic")


# What is put into a file: values of another kind, and what is small on disk and large in memory,
# more of it where there is time.
_MANY = 250_000 if SECONDS <= 1 else 1_500_000
PIECES = (
    b"-", b"9" * 30, b"null", b"\\ud800", b"[" * 2000, b"\0", b"\n" * _MANY, b"{}," * _MANY,
    b'"a":1,' * _MANY, b'"",' * _MANY, b" " * 4 * _MANY,
)  # fmt: skip


def _zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def write_input(folder: Path, kind: str) -> None:
    """A small whole input of one kind."""
    lines = "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS))
    if kind == "text":
        (folder / "a.txt").write_text("\n".join(TEXTS))
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text(lines)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif kind == "jsonl.zst":
        (folder / "a.jsonl.zst").write_bytes(_zstd(lines.encode()))
    elif kind == "parquet":
        table = pa.table({"text": TEXTS, "n": range(len(TEXTS))})
        pq.write_table(table, folder / "a.parquet", row_group_size=10)
    else:
        name = {"mds": "packed_zstd", "mds_zstd": "packed_zstd", "mds_dynamic": "dynamic"}[kind]
        shutil.copytree(ROOT / "tests" / "data" / "mds" / name, folder, dirs_exist_ok=True)
        index = json.loads((folder / "index.json").read_text())
        for shard in index["shards"]:  # damage must reach the reader
            for form in filter(None, (shard["raw_data"], shard["zip_data"])):
                form["hashes"] = {}
            if kind == "mds":
                packed = folder / shard["zip_data"]["basename"]
                plain = pa.input_stream(str(packed), compression="zstd").read()
                (folder / shard["raw_data"]["basename"]).write_bytes(plain)
                packed.unlink()
        (folder / "index.json").write_text(json.dumps(index))


def damage(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to eight changes of several sorts."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(content) + 1)
        sort = rng.randrange(6)
        if sort == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif sort == 1 and at < len(content):
            content[at] = rng.choice([0, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF])
        elif sort == 2:
            del content[at : at + rng.randint(1, 20)]
        elif sort == 3:
            content[at:at] = content[at : at + rng.randint(1, 60)] * rng.choice([1, 2, 300])
        elif sort == 4:
            content[at:at] = rng.choice(PIECES)
        elif sort == 5 and len(content) - at >= 4:
            value = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
            content[at : at + 4] = value.to_bytes(4, "little")
    return bytes(content)


def damaged_file(folder: Path, kind: str, number: int) -> tuple[Path, bytes]:
    """Which file of the input is damaged in case `number`, and its damaged content."""
    rng = random.Random(f"{SEED} {kind} {number}")
    file = rng.choice(sorted(path for path in folder.iterdir()))
    content = file.read_bytes()
    if kind.startswith("jsonl.") and rng.random() < 0.5:  # damage that is whole when decompressed
        plain = damage(pa.input_stream(file, compression="detect").read(), rng)
        return file, _zstd(plain) if kind.endswith("zst") else gzip.compress(plain, 1, mtime=0)
    return file, damage(content, rng)


class AnyTokenizer:
    """Detokenises whatever is in its vocabulary; transformers takes seconds to load a real one."""

    name_or_path = "tokenizer"

    def __init__(self, spec: Any) -> None:
        pass

    def __len__(self) -> int:
        return 512

    def decode(self, ids: list[int], **_: bool) -> str:
        return " ".join(map(str, ids))


def read_all(folder: Path, kind: str) -> None:
    """Every document of an input."""
    name = kind.split("_")[0].split(".")[0]
    path = {"tokenizer": "tokenizer"} if name == "mds" else {}
    source = Source("s", name, str(folder), **path, filters=Filters())
    for part in list_parts(source, 0, 128):
        for document in read_part(part, source):
            pieces = document.pieces() if isinstance(document, TextFile) else [document]
            assert all(isinstance(piece.encode(), bytes) for piece in pieces)


def read_cases(folder: Path, kind: str, progress: Path) -> None:
    """Read damaged inputs until the time is over; `progress` holds the number of the case."""
    deadline = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < deadline or number < 12:
        file, content = damaged_file(folder, kind, number)
        whole = file.read_bytes()
        progress.write_text(f"{kind}, seed {SEED}, case {number}")
        file.write_bytes(content)
        started = time.process_time()
        try:
            read_all(folder, kind)
        except UserError as error:
            assert str(error).isprintable() and len(str(error)) < 1500, f"case {number}: {error}"
        assert time.process_time() - started < _SLOWEST, f"case {number} takes too long"
        file.write_bytes(whole)
        number += 1
    print(f"{kind}: {number} cases", flush=True)


def test_damaged_input_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "load_tokenizer", AnyTokenizer)
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        write_input(folder, kind)
        read_all(folder, kind)
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_data_fuzz", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "USE_TORCH": "0"},
        capture_output=True,
        text=True,
        timeout=(60 + 20 * SECONDS) * len(KINDS),
    )
    progress = tmp_path / "case"
    where = progress.read_text() if progress.exists() else "before the first case"
    assert child.returncode == 0, f"{where}:\n{child.stderr[-3000:]}"
    assert child.stdout.count(" cases\n") == len(KINDS)
    print(child.stdout)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    base = Path(sys.argv[1])
    tokenizer.load_tokenizer = AnyTokenizer
    for one in KINDS:
        read_cases(base / one, one, base / "case")
