"""The search on two processes, as the pipeline starts it: one is killed, then it resumes."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from bosch.heads import HeadMaskFile
from pipeline.run.failures import LOST_RANK_STATUS
from stages.context import ModelConfig, Runtime, StageConfig
from stages.search import run as search
from stages.search.stage import SearchConfig
from tests.rank_processes import run_order
from tests.search_case import WINDOW, order, write_inputs

SEARCH = SearchConfig(swa_ratio=0.5, window_size=WINDOW, budget_per_layer=4)
FRONT = SearchConfig(
    method="front", windows=[4, WINDOW], budget={"ratio": 0.5, "context": 40}, budget_per_layer=30
)
_KILLED_AT = 9


@pytest.fixture
def one_thread():
    """As many threads as each of the two processes has: rounding may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_two_ranks_find_what_one_finds_also_after_a_kill(tmp_path, one_thread):
    base, prepared = write_inputs(tmp_path)
    config = StageConfig(
        section=SEARCH,
        model=ModelConfig(path=str(base), dtype="float32"),
        seed=5,
        runtime=Runtime(eval_batch_size=2),
    )
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    inputs = {"prepare": prepared}
    search.run(config, inputs, alone)

    two = order(config, inputs, shared, "tests.rank_stages:search")
    assert run_order(two, 2, {"KILL_AT": str(_KILLED_AT)}) in (-signal.SIGKILL, LOST_RANK_STATUS)
    log = shared / "evaluations.jsonl"
    assert len(log.read_text().splitlines()) in (_KILLED_AT - 1, _KILLED_AT)
    assert not (shared / "head_mask.json").exists()
    with log.open("a") as file:
        file.write('{"mask": "3x4')

    assert run_order(two, 2) == 0
    assert "resuming from" in (shared / "stage.log").read_text()
    masks = [HeadMaskFile.load(folder / "head_mask.json") for folder in (alone, shared)]
    assert masks[0] == masks[1]
    summaries = [json.loads((f / "summary.json").read_text()) for f in (alone, shared)]
    for name in ("trace", "notes", "best_log_likelihood", "evaluations", "reused_evaluations"):
        assert summaries[0][name] == summaries[1][name]
    keys = [json.loads(line)["mask"] for line in (shared / "evaluations.jsonl").open()]
    assert len(keys) == len(set(keys)) == summaries[0]["evaluations"]


@pytest.mark.parametrize(
    ("section", "result"),
    [
        (SearchConfig(method="bosch_plus", swa_ratio=0.5, window_size=WINDOW), "head_mask.json"),
        (FRONT, "front.json"),
    ],
    ids=["bosch_plus", "front"],
)
def test_a_search_by_gradients_on_two_ranks_finds_what_one_finds(
    section, result, tmp_path, one_thread, monkeypatch
):
    """Gradients, swaps, the ends of evaluations that lose, and examples held out."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base, prepared = write_inputs(tmp_path)
    config = StageConfig(
        section=section,
        model=ModelConfig(path=str(base), dtype="float32"),
        seed=5,
        runtime=Runtime(eval_batch_size=2),
    )
    folders = [tmp_path / "alone", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    inputs = {"prepare": prepared}
    search.run(config, inputs, folders[0])
    assert run_order(order(config, inputs, folders[1], "stages.search.run:run"), 2) == 0
    results = [json.loads((folder / result).read_text()) for folder in folders]
    assert results[0] == results[1]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    for name in ("trace", "notes", "best_score", "best_log_likelihood", "evaluations", "gradients"):
        assert summaries[0][name] == summaries[1][name]
    assert summaries[0]["gradients"] >= 3
    if section.method == "bosch_plus":
        assert any(point["is_bound"] for point in summaries[0]["trace"])
    logs = [
        [json.loads(line) for line in (folder / "evaluations.jsonl").open()] for folder in folders
    ]
    for one, two in zip(*logs, strict=True):
        for entry in (one, two):
            values = entry.get("gradient") or entry.get("held_out") or entry
            # Each process compares a saving with a plain pass when it uses it first.
            del values["seconds"], values["full_forward_equivalents"], entry["crc32"]
        assert one == two
