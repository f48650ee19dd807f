"""torchrun for `pipeline.run.worker`, without its tracebacks: the runner says what went wrong.

Ends with the exit status of the first process that failed for a reason of its own.

Its arguments are torchrun's options, and the command of the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable

import psutil

from pipeline.run.failures import LOST_RANK_STATUS, REQUEUE_STATUS
from pipeline.run.worker import PARENT, die_with_runner


def main() -> int:
    """Start the processes of this node and wait for them; 0 when all of them are done."""
    die_with_runner()
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # torchrun would give its processes 30 seconds to end: training has a restart point to write.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward_signal)
    try:
        torchrun(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return first_reason(failure.exitcode for failure in failures)
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


def forward_signal(signum: int, frame: object) -> None:
    """Pass a signal on to the processes of this node; end where there are none yet.

    It imports nothing: a second signal may come before the first has been passed on.
    """
    children = psutil.Process().children()
    if not children:
        raise SystemExit(128 + signum)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signum)


def first_reason(statuses: Iterable[int]) -> int:
    """Exit status for those of several processes: 128 + n where signal n (-n here) killed one."""
    statuses = list(statuses)
    if REQUEUE_STATUS in statuses:  # all have saved; the last to leave are ended by torchrun
        return REQUEUE_STATUS
    reasons = (status for status in statuses if status != LOST_RANK_STATUS)
    reason = next(reasons, 1)
    return 128 - reason if reason < 0 else reason
