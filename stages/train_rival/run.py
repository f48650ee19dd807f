"""Trains the rival's hybrid as the stage train trains the search's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.context import StageConfig
from stages.rival.stage import RivalConfig
from stages.train.run import run as train
from stages.train.stage import TrainConfig


def run(
    config: StageConfig[RivalConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Train `inputs["rival"]/model` on the same data and with the same settings as `train`.

    Publishes and raises the same as the stage train.
    """
    section = config.upstream_section(TrainConfig)
    own = {name: inputs[name] for name in ("prepare", "search")}
    return train(config.with_section(section), {**own, "materialize": inputs["rival"]}, work_dir)
