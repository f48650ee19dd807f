"""Finished pieces of a command's work survive a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.journal import Journal
from stages.finished import FinishedWork


def never() -> dict[str, object]:
    raise AssertionError("computed again")


def test_a_result_is_computed_once(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    key = {"method": "bosch", "settings": {"seed": 1, "swa_ratio": 0.5}}
    finished = FinishedWork(file)
    assert finished.once(key, lambda: {"score": 0.5}) == {"score": 0.5}
    assert finished.once(key, never) == {"score": 0.5}
    turned = {"settings": {"swa_ratio": 0.5, "seed": 1}, "method": "bosch"}
    assert FinishedWork(file).once(turned, never) == {"score": 0.5}
    assert FinishedWork(file).once({**key, "method": "rand"}, lambda: {"score": 0.1}) == {
        "score": 0.1
    }
    assert len(file.read_text().splitlines()) == 2


def test_a_failed_computation_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    finished = FinishedWork(file)
    with pytest.raises(AssertionError, match="again"):
        finished.once({"n": 0}, never)
    assert not file.exists()
    assert len(finished) == 0


def test_work_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    """Cut off at every byte, the file keeps what was whole and what is added afterwards."""
    file = tmp_path / "results.jsonl"
    finished = FinishedWork(file)
    finished.once({"n": 0}, lambda: {"value": 0})
    first = file.read_bytes()
    finished.once({"n": 1}, lambda: {"value": 1})
    whole = file.read_bytes()
    for length in range(len(first), len(whole)):
        file.write_bytes(whole[:length])
        FinishedWork(file).once({"n": 2}, lambda: {"value": 2})
        again = FinishedWork(file)
        assert again.once({"n": 0}, never) == {"value": 0}
        assert again.once({"n": 2}, never) == {"value": 2}


def test_forgotten_work_is_done_again(tmp_path: Path) -> None:
    finished = FinishedWork(tmp_path / "results.jsonl")
    finished.once({"n": 0}, lambda: {"value": 0})
    finished.forget()
    assert len(finished) == 0
    assert finished.once({"n": 0}, lambda: {"value": 1}) == {"value": 1}


def test_a_line_without_key_or_result_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "results.jsonl"
    FinishedWork(file).once({"n": 0}, lambda: {"value": 0})
    Journal(file).append(
        {"result": {"value": 1}}, {"key": {"n": 1}}, {"key": 1, "result": {}},
        {"key": {"n": 2}, "result": [2]},
    )  # fmt: skip
    finished = FinishedWork(file)
    assert len(finished) == 1
    assert finished.once({"n": 0}, never) == {"value": 0}
    assert finished.once({"n": 2}, lambda: {"value": 2}) == {"value": 2}
    assert "4 damaged lines are not used" in caplog.text
