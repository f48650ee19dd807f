"""Memory that a search may use for reuse between its passes."""

from __future__ import annotations

import os
from typing import Any

from bosch.objective.calibration import CalibrationSet
from bosch.objective.memory import reuse_room
from bosch.ranks import Ranks
from bosch.window import Windows
from stages.context import Runtime


def reuse_bytes(
    runtime: Runtime, model: Any, windows: Windows, calibration: CalibrationSet, ranks: Ranks
) -> int:
    """Bytes of `runtime.reuse_memory`, by default what this process has room for.

    Shards have as much as the one with the least. Call it when the model is loaded.
    """
    if isinstance(runtime.reuse_memory, int):
        return runtime.reuse_memory
    split = runtime.search_parallel == "context"
    room = reuse_room(
        model,
        windows,
        min(runtime.eval_batch_size, len(calibration)),
        calibration.max_length,
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        shards=1 if split else ranks.shards,
        sharing=ranks.shards if split else 1,
    )
    return ranks.least(room)
