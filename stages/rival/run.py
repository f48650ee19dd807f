"""The mask of a rule or ranking, and the hybrid under it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bosch.heads import HeadMaskFile
from stages.context import StageConfig
from stages.evaluate.rivals import rival_masks
from stages.materialize.run import run as materialize
from stages.materialize.stage import MODEL, MaterializeConfig
from stages.rival.stage import RivalConfig
from stages.search.stage import HEAD_MASK


def run(
    config: StageConfig[RivalConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write mask/head_mask.json, and model/ and summary.json as the stage materialize does.

    The mask is as in `evaluate.rivals`: it has the number of sliding heads and the window of the
    search's mask; for several windows see `rival_masks`.

    Raises UserError when the base model or the calibration set is missing or damaged.
    """
    searched = HeadMaskFile.load(inputs["materialize"] / MODEL / HEAD_MASK)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    methods = [config.section.method]
    (file,) = rival_masks(config, methods, searched, inputs["search"], device)
    folder = work_dir / "mask"
    file.save(folder / HEAD_MASK)
    section = config.upstream_section(MaterializeConfig)
    return materialize(config.with_section(section), {"search": folder}, work_dir)
