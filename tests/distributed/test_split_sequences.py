"""Search and evaluation that gloo processes share: the results of one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.stage import EvaluateConfig
from tests.rank_processes import run_module, run_order
from tests.search_case import order
from tests.tiny_data import save_tiny_model


@pytest.mark.parametrize("module", ["tests.split_search", "tests.split_reading"])
def test_split_sequences_give_what_one_process_gives(module: str) -> None:
    """Gemma 2 has layers with windows of their own and capped scores."""
    done = run_module(module, ["qwen3", "gemma2"], 2)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} agrees" in done.stdout for rank in range(2))


def test_an_evaluation_by_two_processes_gives_the_answers_of_one(tmp_path: Path) -> None:
    """To the bit where each has samples of its own; splitting a prompt rounds otherwise."""
    model = save_tiny_model(tmp_path / "model")
    section = EvaluateConfig.model_validate(
        {
            "needle": {
                "tasks": ["niah_single_1", "niah_single_3"], "lengths": [400], "samples": 3,
                "max_new_tokens": 4,
            },
            "positions": {"length": 300, "documents": 2},
        }
    )  # fmt: skip
    samples = []
    for parallel, ranks in (("data", 1), ("data", 2), ("context", 2)):
        config = StageConfig(
            section,
            ModelConfig(path=str(model), dtype="float32"),
            seed=1,
            runtime=Runtime(eval_batch_size=2, evaluate_parallel=parallel),
        )
        work = tmp_path / f"{parallel} {ranks}"
        work.mkdir()
        assert run_order(order(config, {}, work, "stages.original.run:run"), ranks) == 0
        assert not (work / "answers").exists()
        lines = (work / "samples.jsonl").read_text().splitlines()
        samples.append([json.loads(line) for line in lines])
        assert len(lines) == 8
    assert samples[0] == samples[1]
    for one, two in zip(samples[0], samples[2], strict=True):
        losses = one.pop("loss", []), two.pop("loss", [])
        assert one == two
        np.testing.assert_allclose(*losses, atol=1e-6, rtol=0)
