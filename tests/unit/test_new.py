"""`bosch new` reads the data that it is given, and what it writes is valid."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from stages.prepare.stage import PrepareConfig
from tests.elsewhere import ROOT
from tests.pipeline_case import Case


def _write_table(folder: Path, *fields: str) -> None:
    rows = {name: [f"some {name} " * (i + 1)] * 3 for i, name in enumerate(fields)}
    pq.write_table(pa.table(rows), folder / "a.parquet")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            lambda to: (to / "c4.00000-of-01024.json.gz").write_bytes(
                gzip.compress(b'{"url": "https://some.where", "text": "some"}\n')
            ),
            {"kind": "jsonl"},
        ),
        (lambda to: _write_table(to, "text", "summary"), {"kind": "parquet"}),
        (lambda to: Dataset.from_dict({"text": ["some"]}).save_to_disk(to),
         {"kind": "huggingface"}),
        (lambda to: shutil.copytree(ROOT / "tests/data/mds/text", to, dirs_exist_ok=True),
         {"kind": "mds"}),
        (lambda to: (to / "a.jsonl").write_text('{"id": "a", "body": "some words", "n": 1}\n'),
         {"kind": "jsonl", "text_field": "body"}),
        (lambda to: _write_table(to, "id", "longest_story"),
         {"kind": "parquet", "text_field": "longest_story"}),
        (lambda to: (to / "a.txt.gz").write_bytes(gzip.compress(b"some")), {"kind": "text"}),
    ],
)  # fmt: skip
def test_what_new_writes_is_valid(
    case: Case,
    write: Callable[[Path], object],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(case.folder)
    Path("mine").mkdir()
    write(Path("mine"))
    assert main(["new", "model", "--data", "mine"]) == 0
    assert "before it can run" not in capsys.readouterr().out
    [source] = load_recipe("my_model.yaml", env={}).recipe[PrepareConfig].sources
    written = {name: getattr(source, name) for name in ("kind", "split", "text_field")}
    assert written == {"split": "train", "text_field": "text"} | expected
    assert main(["validate", "my_model.yaml"]) == 0


def test_new_says_that_records_have_no_text(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(case.folder)
    Path("a.jsonl").write_text('{"m": 2, "n": 1}\n')
    assert main(["new", "model", "--data", "a.jsonl"]) == 0
    said = "no field `text` (there is m, n); set text_field"
    assert re.search(f"^before it can run: .*{re.escape(said)}", capsys.readouterr().out, re.M)
