"""An evaluation of a tiny model in this process, without the needle tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.scores import Scores
from stages.evaluate.stage import EvaluateConfig
from stages.original import run as original


def suites_config(folder: Path, **section: Any) -> StageConfig[EvaluateConfig]:
    """The evaluation of `folder`/model."""
    return StageConfig(
        EvaluateConfig(**{"needle": None} | section),
        ModelConfig(path=str(folder / "model"), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=2),
    )


def score_original(folder: Path, work: Path, **section: Any) -> Scores:
    """Scores of the original model; creates `work`, the stage's output."""
    work.mkdir()
    original.run(suites_config(folder, **section), {}, work)
    return Scores.read(work)
