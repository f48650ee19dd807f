"""The search on two processes that share the examples, with a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bosch.score.evaluation_log import EvaluationLog
from stages.context import StageConfig
from stages.search import run as search
from stages.search.stage import SearchConfig
from tests.rank_processes import run_order
from tests.search_case import WINDOW, config_of, order, write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

SEARCH = SearchConfig(swa_ratio=0.5, window_size=WINDOW, budget_per_layer=4)
PLUS = SearchConfig(method="bosch_plus", swa_ratio=0.5, window_size=WINDOW)
FRONT = SearchConfig(
    method="front", windows=[4, WINDOW], budget={"kv_cache": "0.6 @ 40"}, budget_per_layer=30
)
_KILLED_AT = 9


@pytest.fixture
def case(tmp_path):
    """A saved model, the inputs of a search, and folders for one process and for two."""
    base, prepared = write_inputs(tmp_path)
    folders = [tmp_path / "alone", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    return base, {"prepare": prepared}, folders


def read(folders, name):
    return [json.loads((folder / name).read_text()) for folder in folders]


def search_or_die(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """The search; its second rank dies after KILL_AT evaluations, if set."""
    append = EvaluationLog.append

    def append_or_die(self: Any, mask: Any, evaluation: Any, stage: str) -> None:
        append(self, mask, evaluation, stage)
        if os.environ["RANK"] == "1" and len(self) == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)

    if "KILL_AT" in os.environ:
        EvaluationLog.append = append_or_die  # type: ignore[method-assign]
    return search.run(config, inputs, work_dir)


def test_two_ranks_find_what_one_finds_also_after_a_kill(case):
    base, inputs, folders = case
    config = config_of(base, SEARCH)
    search.run(config, inputs, folders[0])
    two = order(config, inputs, folders[1], f"{__name__}:search_or_die")
    assert run_order(two, 2, {"KILL_AT": str(_KILLED_AT)}) in (-signal.SIGKILL, 1)
    log = folders[1] / "evaluations.jsonl"
    assert len(log.read_text().splitlines()) in (_KILLED_AT - 1, _KILLED_AT)
    assert not (folders[1] / "head_mask.json").exists()
    with log.open("a") as file:
        file.write('{"mask": "3x4')

    assert run_order(two, 2) == 0
    assert "resuming from" in (folders[1] / "stage.log").read_text()
    masks, summaries = read(folders, "head_mask.json"), read(folders, "summary.json")
    assert masks[0] == masks[1]
    for name in (
        "trace",
        "notes",
        "best_log_likelihood",
        "evaluations",
        "full_forward_equivalents",
    ):
        assert summaries[0][name] == summaries[1][name]
    keys = [json.loads(line)["mask"] for line in log.open()]
    assert len(keys) == len(set(keys)) == summaries[0]["evaluations"]


@pytest.mark.parametrize("section", [PLUS, FRONT])
def test_two_processes_find_what_one_finds(section, case):
    """Gradients, swaps and held-out examples, bit for bit."""
    base, inputs, folders = case
    search.run(config_of(base, section), inputs, folders[0])
    two = config_of(base, section)
    assert run_order(order(two, inputs, folders[1], "stages.search.run:run"), 2) == 0
    results = read(folders, "front.json" if section is FRONT else "head_mask.json")
    assert results[0] == results[1]
    summaries = read(folders, "summary.json")
    exact = ("trace", "notes", "best_log_likelihood", "evaluations", "best_score", "gradients")
    for name in exact:
        assert summaries[0][name] == summaries[1][name]
    assert summaries[0]["gradients"] >= 3
    logs = [
        [json.loads(line) for line in (folder / "evaluations.jsonl").open()] for folder in folders
    ]
    for one, two in zip(*logs, strict=True):
        for entry in (one, two):
            values = entry.get("gradient") or entry.get("held_out") or entry
            del values["seconds"], entry["crc32"]
        assert one == two
