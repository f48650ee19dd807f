"""A study's finished cells survive a stop, and its options are checked before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from stages.studying.cells import Cells
from tests.pipeline_case import ROOT, Case


def never() -> dict[str, object]:
    raise AssertionError("computed again")


def test_a_cell_is_computed_once_ever(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cells.jsonl"
    key = {"method": "bosch", "settings": {"seed": 1, "swa_ratio": 0.5}}
    cells = Cells(file)
    assert cells.once(key, lambda: {"score": 0.5}) == {"score": 0.5}
    assert cells.once(key, never) == {"score": 0.5}
    turned = {"settings": {"swa_ratio": 0.5, "seed": 1}, "method": "bosch"}
    assert Cells(file).once(turned, never) == {"score": 0.5}
    assert Cells(file).once({**key, "method": "rand"}, lambda: {"score": 0.1}) == {"score": 0.1}
    assert len(file.read_text().splitlines()) == 2


def test_a_torn_line_is_cut_off_and_a_damaged_one_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    cells = Cells(file)
    for number in range(3):
        cells.once({"n": number}, lambda number=number: {"value": number})
    first, second, third = file.read_text().splitlines(keepends=True)
    file.write_text(first + second.replace("result", "resu1t") + third[:-9])
    again = Cells(file)
    assert len(again) == 1
    assert file.read_text() == first + second.replace("result", "resu1t")
    assert again.once({"n": 0}, never) == {"value": 0}
    assert again.once({"n": 2}, lambda: {"value": 5}) == {"value": 5}
    assert json.loads(file.read_text().splitlines()[-1]) == {
        "key": {"n": 2},
        "result": {"value": 5},
    }


def test_a_failed_computation_leaves_nothing(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    with pytest.raises(AssertionError, match="again"):
        cells.once({"n": 0}, never)
    assert not cells.path.exists()
    assert len(cells) == 0


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--ratios", "0.5,2", "--ratios 0.5,2: 2 does not lie between 0 and 1"),
        ("--ratios", "half", "'half' is not a number"),
        ("--seeds", "0", "'0' is not a positive whole number"),
        ("--seeds", "2,3", "--seeds 2,3: expected one number"),
        ("--budgets", "4,x", "'x' is not a count"),
        ("--methods", "bosch,bsch", "'bsch' is unknown: choose from bosch"),
    ],
)
def test_options_without_meaning_are_refused(
    option: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case(tmp_path)
    assert main(["study", "cost", str(case.file), option, value]) == 2
    assert sentence in capsys.readouterr().err
    assert not case.runs.exists()


def test_options_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    case = Case(tmp_path)
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import sys; from pipeline.cli import main; print(main(sys.argv[1:]), 'torch' in "
            "sys.modules)",
            "study", "cost", str(case.file), "--methods", "bosch,bsch",
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"], done.stderr
