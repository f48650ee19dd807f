"""torchrun for `pipeline.worker`, without its tracebacks: the runner says what went wrong.

Ends with the exit status of the first process that failed for a reason of its own.

`python -m pipeline.elastic [torchrun options] -m pipeline.worker ORDER`
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

from pipeline.worker import LOST_RANK_STATUS, PARENT, die_with_parent


def main() -> int:
    """Start the processes of this node and wait for them; 0 when all of them are done."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return first_reason(failure.exitcode for failure in failures)
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


def first_reason(statuses: Iterable[int]) -> int:
    """Exit status for those of several processes: 128 + n where signal n (-n here) killed one."""
    reasons = (status for status in statuses if status != LOST_RANK_STATUS)
    reason = next(reasons, 1)
    return 128 - reason if reason < 0 else reason


if __name__ == "__main__":
    sys.exit(main())
