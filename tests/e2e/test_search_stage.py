"""The search stage on a small model: its files, its methods, and a stop during a search."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from bosch.budget import swa_budget
from bosch.errors import RunError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation, EvaluationLog
from bosch.search.bosch import SearchResult
from bosch.search.loss import Anchors
from bosch.search.methods import METHODS
from bosch.window import Window
from stages.context import StageConfig
from stages.search import run as search
from stages.search.stage import TRACES, SearchConfig
from tests.hybrid_case import KV_HEADS, LAYERS
from tests.search_case import WINDOW, config_of, write_inputs


def config_in(base: Path, **changes: object) -> StageConfig:
    options = {"swa_ratio": 0.5, "window_size": WINDOW, "budget_per_layer": 4, **changes}
    return config_of(base, SearchConfig.model_validate(options), eval_batch_size=3)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run(inputs: tuple[Path, Path], work: Path, **changes: object) -> dict:
    work.mkdir(exist_ok=True)
    base, prepared = inputs
    search.run(config_in(base, **changes), {"prepare": prepared}, work)
    return json.loads((work / "summary.json").read_text())


# One of each kind; tests/unit/test_methods.py has the masks of all. `given` needs a file:
# tests/unit/test_budgets.py; of a front no mask is chosen yet.
_OF_KINDS = {METHODS[name].kind: name for name in reversed(METHODS) if name != "front"}


@pytest.mark.parametrize(
    ("method", "ratio"),
    [*((name, 0.75) for kind, name in _OF_KINDS.items() if kind != "file"), ("bosch", 0.3)],
)
def test_a_method_of_each_kind_writes_its_files(inputs, tmp_path, method, ratio):
    summary = run(inputs, tmp_path, method=method, swa_ratio=ratio)
    file = HeadMaskFile.load(tmp_path / "head_mask.json")
    units = LAYERS * KV_HEADS
    assert (~file.mask.is_full).sum() == swa_budget(units, ratio)
    assert (file.method, file.seed, file.mask.menu) == (method, 5, (Window(WINDOW),))
    for name in TRACES.values():
        groups = ElementTree.parse(tmp_path / name).iter("{http://www.w3.org/2000/svg}g")
        [points] = [group for group in groups if "mark-symbol role-mark" in group.get("class", "")]
        assert len(points) == len(summary["trace"]) + 1  # the final mask has its own mark
    assert file.score == summary["best_score"]
    assert summary["anchors"]["all_full"] == 1.0
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    entries = [
        entry for entry in map(json.loads, lines) if not {"gradient", "held_out"} & entry.keys()
    ]
    assert len({entry["mask"] for entry in entries}) == len(entries) == summary["evaluations"]
    assert file.mask.key in {entry["mask"] for entry in entries}
    if method in ("bosch", "b_single"):
        assert any("log-likelihood" in note for note in summary["notes"])
        assert [row["layer"] for row in summary["layer_importance"]] == list(range(LAYERS))
        assert sum(row["ratio"] for row in summary["layer_importance"]) * KV_HEADS == pytest.approx(
            swa_budget(units, ratio)
        )


def test_a_stopped_search_prints_its_best_mask_and_where_it_is(
    inputs, tmp_path, monkeypatch, caplog
):
    append = EvaluationLog.append

    def interrupted(self, mask, evaluation, phase):
        append(self, mask, evaluation, phase)
        if phase == "head_selection":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(EvaluationLog, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path)
    assert "evaluations are kept" in caplog.text
    best = HeadMaskFile.load(tmp_path / "best_so_far.json")
    assert (~best.mask.is_full).sum() == swa_budget(LAYERS * KV_HEADS, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").open()]
    scores = {line["mask"]: line["score"] for line in lines}
    assert best.score == scores[best.mask.key]
    assert f"scores {best.score:.4f}" in caplog.text
    assert "all full 1.0000" in caplog.text
    assert str(tmp_path / "best_so_far.json") in caplog.text
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert not (tmp_path / "head_mask.json").exists()


def test_the_summary_distinguishes_the_result_from_the_last_phases_mask():
    evaluator = SimpleNamespace(
        costs=lambda: {"evaluations": 3}, fresh_seconds=2.0, trace=[], notes=["a note"]
    )
    mask = HeadMask.all_full(1, 1)
    best, last = Evaluation(0.8, -1.0, 0.0, 0.0), Evaluation(0.7, -2.0, 0.0, 0.0)
    result = SearchResult(mask, best, Anchors(0.1, 0.9), last, [{"layer": 0}])
    assert search.summary_of(evaluator, result, 5.0) == {
        "anchors": {"all_sliding": 0.1, "all_full": 0.9}, "best_score": 0.8,
        "best_log_likelihood": -1.0, "last_phase_score": 0.7, "last_phase_log_likelihood": -2.0,
        "evaluations": 3, "solver_seconds": 3.0, "layer_importance": [{"layer": 0}], "trace": [],
        "notes": ["a note"],
    }  # fmt: skip


def test_evaluations_appear_in_log_and_tensorboard(inputs, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second search finds all its evaluations in the log
        summary = run(inputs, tmp_path)
        (events,) = (tmp_path / "tensorboard").iterdir()
        board = EventAccumulator(str(events), size_guidance={"scalars": 0})
        board.Reload()

        def values(name, board=board):
            return [round(event.value, 5) for event in board.Scalars(f"search/{name}")]

        trace = summary["trace"]
        assert values("score") == [round(point["score"], 5) for point in trace]
        assert [event.step for event in board.Scalars("search/score")] == list(
            range(1, len(trace) + 1)
        )
        assert values("evaluations")[-1] == summary["evaluations"]
        best = values("best_score")
        assert best == sorted(best)
        assert best[-1] >= round(summary["best_score"], 5)
        assert not (tmp_path / "best_so_far.json").exists()


def test_a_folder_that_cannot_be_written_is_reported_in_a_sentence(inputs, tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device", folder)

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    with pytest.raises(RunError, match="the search cannot write there"):
        run(inputs, tmp_path)
