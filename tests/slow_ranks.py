"""A training whose second rank hangs for a while, or whose first one saves slowly.

python -m tests.slow_ranks CASE WORK '{"train": {...}, "runtime": {...}}'; SLOW says which.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bosch import ranks
from stages.train.loop import Loop
from stages.train.storage import RestartPoints
from tests.training_case import main

SECONDS = 9.0


def _hang_in_step_three() -> None:
    loss_of = Loop.loss_of

    def late_loss(self: Loop, *args: Any) -> Any:
        if self.step == 3:
            time.sleep(SECONDS)
        return loss_of(self, *args)

    Loop.loss_of = late_loss  # type: ignore[method-assign]


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
