"""Stage train_rival: the training of the recipe, on the rival's hybrid."""

from __future__ import annotations

from stages.rival.stage import RivalConfig
from stages.stage import Stage
from stages.train.stage import STAGE as TRAIN

STAGE = Stage(
    "train_rival",
    "stages.train_rival.run:run",
    RivalConfig,
    version=TRAIN.version,
    key="rival",
    # Of the stage train it takes the section alone.
    needs=("prepare", "rival", "train"),
    distributed=True,
    cost="stages.train.cost:of_rival",
)
