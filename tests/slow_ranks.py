"""A training whose second rank hangs for a while, or whose first one saves and tidies slowly.

python -m tests.slow_ranks CASE WORK '{"train": {...}, "runtime": {...}}'; SLOW says which.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bosch import ranks
from stages.train import decisions
from stages.train.loop import Loop
from stages.train.storage import RestartPoints
from tests.training_case import main

SECONDS = 9.0


def _hang_in_step(number: int) -> None:
    loss_of = Loop.loss_of

    def late_loss(self: Loop, *args: Any) -> Any:
        if self.step == number:
            time.sleep(SECONDS)
        return loss_of(self, *args)

    Loop.loss_of = late_loss  # type: ignore[method-assign]


def _save_slowly() -> None:
    publish, remove = RestartPoints.publish, RestartPoints.remove

    def publish_late(self: Any, *args: Any) -> None:
        time.sleep(SECONDS)
        publish(self, *args)

    def remove_late(self: Any) -> None:
        time.sleep(SECONDS)
        remove(self)

    RestartPoints.publish = publish_late  # type: ignore[method-assign]
    RestartPoints.remove = remove_late  # type: ignore[method-assign]


if __name__ == "__main__":
    ranks.REPORT_SECONDS = 1.0
    decisions.MIN_STEP_TIMEOUT, decisions.TIMEOUT_FACTOR = 5 / 60, 0
    steps = {"step": 3, "late step": 8}
    if os.environ["SLOW"] in steps and os.environ["RANK"] == "1":
        _hang_in_step(steps[os.environ["SLOW"]])
    elif os.environ["SLOW"] == "save":
        _save_slowly()
    main()
