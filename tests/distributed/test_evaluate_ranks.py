"""Evaluation on two processes gives the answers of one process."""

from __future__ import annotations

import json

from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.stage import EvaluateConfig
from tests.rank_processes import run_order
from tests.search_case import order
from tests.tiny_data import save_tiny_model


def test_two_ranks_give_the_answers_of_one(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    needle = {
        "tasks": ["niah_single_1", "niah_single_3"], "lengths": [400], "samples": 5,
        "max_new_tokens": 4,
    }  # fmt: skip
    config = StageConfig(
        EvaluateConfig(needle=needle),
        ModelConfig(path=str(model), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=1),
    )
    samples = []
    for ranks in (1, 2):
        work = tmp_path / f"work{ranks}"
        work.mkdir()
        assert run_order(order(config, {}, work, "stages.original.run:run"), ranks) == 0
        assert not (work / "answers").exists()
        samples.append((work / "samples.jsonl").read_text())
        assert json.loads((work / "scores.json").read_text())["checkpoints"]["original"]
    assert samples[0] == samples[1]
    assert len(samples[0].splitlines()) == 10
