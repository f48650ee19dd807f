"""A training whose second rank hangs for a while, or whose first one saves slowly.

python -m tests.slow_ranks CASE WORK '{"train": {...}, "runtime": {...}}'; SLOW says which.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bosch import ranks
from stages.train.storage import RestartPoints
from stages.train.trainer import PretrainingTrainer
from tests.training_case import main

SECONDS = 9.0


def _hang_in_step_three() -> None:
    compute = PretrainingTrainer.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            time.sleep(SECONDS)
        return compute(self, *args, **kwargs)

    PretrainingTrainer.compute_loss = compute_loss


def _save_slowly() -> None:
    publish = RestartPoints.publish

    def publish_late(self: Any, *args: Any) -> None:
        time.sleep(SECONDS)
        publish(self, *args)

    RestartPoints.publish = publish_late  # type: ignore[method-assign]


if __name__ == "__main__":
    ranks.REPORT_SECONDS = 1.0
    if os.environ["SLOW"] == "step" and os.environ["RANK"] == "1":
        _hang_in_step_three()
    elif os.environ["SLOW"] == "save":
        _save_slowly()
    main()
