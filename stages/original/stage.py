"""Stage original: scores of the original model, shared by all recipes on it."""

from __future__ import annotations

from stages.evaluate.stage import EvaluateConfig
from stages.stage import Stage, model_processes

STAGE = Stage(
    "original",
    "stages.original.run:run",
    EvaluateConfig,
    key="evaluate",
    after=("materialize",),
    model="weights",
    distributed=True,
    processes=model_processes,
    cost="stages.evaluate.cost:original",
)
