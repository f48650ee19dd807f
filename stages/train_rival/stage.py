"""Stage train_rival: the training of the recipe, on the rival's hybrid."""

from __future__ import annotations

from stages.rival.stage import RivalConfig
from stages.stage import Stage
from stages.train.stage import training_processes

STAGE = Stage(
    "train_rival",
    "stages.train_rival.run:run",
    RivalConfig,
    key="rival",
    needs=("prepare", "search", "rival"),
    reads=("train",),
    after=("train",),
    distributed=True,
    processes=training_processes,
    cost="stages.train.cost:cost",
)
