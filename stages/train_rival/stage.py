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
    needs=("prepare", "rival", "train"),
    configured_by=("train",),
    distributed=True,
    choices=TRAIN.choices,
    cost="stages.train.cost:of_rival",
    timed=TRAIN.timed,
)
