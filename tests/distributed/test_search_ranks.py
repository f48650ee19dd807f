"""The search on two processes, as the pipeline starts it: one is killed, then it goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from bosch.errors import RunError
from bosch.evaluation_log import EvaluationLog
from bosch.heads import HeadMaskFile
from pipeline.elastic import first_reason
from pipeline.launch import launch
from pipeline.worker import LOST_RANK_STATUS
from pipeline.world import World
from stages import search
from stages.configs import ModelConfig, Runtime, SearchConfig
from stages.context import StageConfig
from tests.search_case import WINDOW, write_inputs

_KILLED_AT = 9


def dying(config, inputs, work_dir):
    """The search with a second rank that dies as soon as it knows some evaluations."""
    append = EvaluationLog.append

    def append_or_die(self, mask, evaluation, stage):
        append(self, mask, evaluation, stage)
        if os.environ["RANK"] == "1" and len(self) == _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    EvaluationLog.append = append_or_die
    return search.run(config, inputs, work_dir)


def order(config: StageConfig, inputs: dict[str, Path], work: Path, function: str) -> dict:
    def typed(section):
        return {
            "type": f"stages.configs:{type(section).__name__}",
            "values": section.model_dump(mode="json"),
        }

    return {
        "stage": "search",
        "function": function,
        "section": typed(config.section),
        "model": typed(config.model),
        "seed": config.seed,
        "runtime": typed(config.runtime),
        "upstream": {},
        "inputs": {name: str(path) for name, path in inputs.items()},
        "work_dir": str(work),
        "log_level": "info",
    }


@pytest.fixture
def one_thread():
    """As many threads as each of the two processes has: rounding may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_two_ranks_find_what_one_finds_also_after_a_kill(tmp_path, one_thread, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base, prepared = write_inputs(tmp_path)
    config = StageConfig(
        section=SearchConfig(
            swa_ratio=0.5, window_size=WINDOW, budget_per_layer=4, tie_break="log_likelihood"
        ),
        model=ModelConfig(path=str(base), dtype="float32"),
        seed=5,
        runtime=Runtime(eval_batch_size=2),
    )
    inputs, world = {"prepare": prepared}, World(processes_per_node=2)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    search.run(config, inputs, alone)

    with pytest.raises(RunError, match="killed"):
        launch(order(config, inputs, shared, "tests.distributed.test_search_ranks:dying"), world)
    assert not (shared / "head_mask.json").exists()
    log = shared / "evaluations.jsonl"
    assert len(log.read_text().splitlines()) in (_KILLED_AT - 1, _KILLED_AT)
    with log.open("a") as file:
        file.write('{"mask": "3x4')

    summary = launch(order(config, inputs, shared, "stages.search:run"), world)
    assert "going on from" in (shared / "stage.log").read_text()
    masks = [HeadMaskFile.load(folder / "head_mask.json") for folder in (alone, shared)]
    assert masks[0] == masks[1]
    summaries = [json.loads((f / "summary.json").read_text()) for f in (alone, shared)]
    assert summaries[0]["trace"] == summaries[1]["trace"]
    assert summaries[0]["notes"] == summaries[1]["notes"]
    assert summary["best_log_likelihood"] == summaries[0]["best_log_likelihood"]
    keys = [json.loads(line)["mask"] for line in log.open()]
    assert len(keys) == len(set(keys)) == summaries[0]["evaluations"]


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ([LOST_RANK_STATUS, -signal.SIGKILL], 128 + signal.SIGKILL),
        ([LOST_RANK_STATUS, 2], 2),
        ([1, -signal.SIGKILL], 1),
        ([LOST_RANK_STATUS], 1),
    ],
)
def test_the_rank_with_a_reason_of_its_own_is_told(statuses, told):
    assert first_reason(statuses) == told
