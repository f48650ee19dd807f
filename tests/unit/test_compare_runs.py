"""Equal runs of bosch_plus compare equal; every kind of changed result is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bosch.heads import HeadMask
from bosch.objective.evaluation_log import (
    Evaluation,
    EvaluationContext,
    EvaluationLog,
    GateGradient,
)
from tests.tools.compare_runs import main, run_results

MASK = HeadMask.all_full(1, 2)
METRICS = {"step": 1, "tokens": 64, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": 0.4}
SAMPLE = {"checkpoint": "hybrid", "suite": "needle", "task": "t", "length": 512, "index": 0}


def write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    record = {"task": "t", "index": 0, "input_ids": [1, 2, 3], "answer_length": 1}
    write(run / "prepare/train/data.arrow", b"\x00\x01")
    write(run / "prepare/calibration/calibration.jsonl", json.dumps(record) + "\n")
    log = EvaluationLog(run / "search/evaluations.jsonl", EvaluationContext("data", "model", 16, 0))
    log.append(MASK, Evaluation(0.5, -1.25, seconds=0.1), "anchors")
    log.append_gradient(MASK, "0/8", GateGradient([[0.75, -0.5]]))
    log.append_held_out(MASK, Evaluation(0.25, -2.5))
    for file in ("search/head_mask.json", "rival/mask/head_mask.json"):
        write(run / file, json.dumps({"swa_kv_heads": [[1]], "model": "x"}))
    write(run / "search/front.json", json.dumps({"points": [{"kv_slots": 8, "layout": [[0]]}]}))
    for stage in ("train", "train_rival"):
        write(run / stage / "metrics.jsonl", json.dumps(METRICS) + "\n")
    scores = {"checkpoints": {"hybrid": {"needle": {"average": 75.0}}}}
    write(run / "evaluate/scores.json", json.dumps(scores))
    sample = {**SAMPLE, "score": 1.0, "output": ": 7"}
    by_position = {**SAMPLE, "suite": "positions", "loss": [3.5, 1.25]}
    lines = "".join(json.dumps(one) + "\n" for one in (sample, by_position))
    write(run / "evaluate/samples.jsonl", lines)
    trained = ("train/checkpoints/tokens-64", "train_rival/checkpoints/tokens-64")
    for folder in ("materialize/model", "rival/model", *trained):
        (run / folder).mkdir(parents=True)
        weights = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "s": torch.tensor(3.0)}
        save_file(weights, run / folder / "model.safetensors")
    return run


def compare(monkeypatch: pytest.MonkeyPatch, *runs: Path) -> int:
    monkeypatch.setattr("sys.argv", ["compare_runs", *map(str, runs)])
    return main()


@pytest.fixture
def other(run: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, run.parent / "other"))


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "line"),
    [
        ("prepare/train/data.arrow", "\x01", "\x02", "data.arrow: "),
        ("prepare/calibration/calibration.jsonl", "3]", "4]", "line 1: ('t', 0, [1, 2, 3]"),
        ("search/evaluations.jsonl", "-1.25", "-1.2500000000000002", "line 1: ('1x2"),
        ("search/evaluations.jsonl", "0.75", "0.8", "line 2: ('1x2"),
        ("search/evaluations.jsonl", "-2.5", "-2.6", "line 3: ("),
        ("search/front.json", "[[0]]", "[[1]]", "search/front.json 8 slots: [[0]] → [[1]]"),
        ("search/head_mask.json", "[[1]]", "[[0]]", "search/head_mask.json heads: [[1]] → ["),
        ("rival/mask/head_mask.json", "[[1]]", "[[0]]", "rival/mask/head_mask.json heads: [[1]]"),
        ("train/metrics.jsonl", "2.5", "2.5000001", "train line 1: (1, 64, 2.5,"),
        ("train_rival/metrics.jsonl", "2.5", "2.6", "train_rival line 1: (1, 64, 2.5,"),
        ("evaluate/scores.json", "75", "76", "hybrid.needle.average: 75.0 → 76.0"),
        ("evaluate/samples.jsonl", ": 7", ": 8", "hybrid needle t 512 0: {'score': 1.0,"),
        ("evaluate/samples.jsonl", "1.25", "1.5", "hybrid positions t 512 0: {'loss': "),
    ],
)
def test_every_changed_result_is_reported(
    run: Path, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, old: str, new: str, line: str,
) -> None:  # fmt: skip
    rewrite(other / name, old, new)
    assert compare(monkeypatch, run, other) == 1
    assert f"\n  {line}" in capsys.readouterr().out


def test_changed_weights_and_missing_results_are_reported(
    run: Path, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ("train/checkpoints/tokens-64", "rival/model", "train_rival/checkpoints/tokens-64")
    for folder in folders:
        file = other / folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    log = other / "search/evaluations.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[0])
    (other / "train/metrics.jsonl").unlink()
    assert compare(monkeypatch, run, other) == 1
    out = capsys.readouterr().out
    for line in (*folders, "line 4: only in the second run", "train line 1: only in the first run"):
        assert f"\n  {line}" in out


def test_timings_checksums_and_places_of_files_are_ignored(
    run: Path, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(other / "search/evaluations.jsonl", '"seconds": 0.1', '"seconds": 0.2')
    line = (other / "train/metrics.jsonl").read_text()
    (other / "train/metrics.jsonl").write_text(f"0123abcd {line}")
    (other / "baseline").mkdir()
    (other / "evaluate/scores.json").rename(other / "baseline/scores.json")
    assert compare(monkeypatch, run, other) == 0
    out = capsys.readouterr().out
    assert out.count("no differences") == len(run_results(run)) == 8
    assert "weights: 8 results" in out


def test_two_runs_without_results_are_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(monkeypatch, tmp_path, tmp_path) == 1
    assert "weights: 0 results, 1 differences\n  neither run has any" in capsys.readouterr().out
