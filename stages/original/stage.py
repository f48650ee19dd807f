"""Stage original: scores of the original model, shared by all recipes on it."""

from __future__ import annotations

from stages.evaluate.stage import EvaluateConfig, model_card
from stages.stage import Stage

STAGE = Stage(
    "original",
    "stages.original.run:run",
    EvaluateConfig,
    version=24,
    key="evaluate",
    after=("materialize",),
    model="weights",
    distributed=True,
    card=model_card,
    pool="evaluation",
    unread=("rivals", "windows", "budgets"),
    cost="stages.evaluate.cost:original",
)
