"""torchrun for `pipeline.run.worker`, without torchrun's tracebacks.

Ends with the exit status of the first process that failed for its own reason, not because another
process had ended, and writes its rank to ENDED in the order's folder.

Its arguments are torchrun's options and the worker's command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from bosch.files import write_json
from bosch.this_process import STOP_SIGNALS, heeded
from pipeline.run.failures import ENDED, LOST_RANK_STATUS, REQUEUE_STATUS
from pipeline.run.worker import PARENT, die_with_runner


def main() -> int:
    """Start the processes of this node and wait for them; returns 0 if all succeed."""
    die_with_runner()
    os.environ[PARENT] = str(os.getpid())
    # torchrun gives its processes 30 seconds to end, too little for a restart point.
    # torchrun handles SIGINT once it has been imported, which takes a while.
    for number in (*heeded(signal.SIGINT), *STOP_SIGNALS):
        signal.signal(number, forward_signal)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        names = ",".join(number.name for number in heeded(signal.SIGINT, signal.SIGQUIT))
        torchrun([f"--signals-to-handle={names}", *sys.argv[1:]])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
        rank, status = first_reason({rank: failure.exitcode for rank, failure in failures})
        with contextlib.suppress(OSError):
            write_json(Path(sys.argv[-1]).parent / ENDED, {"rank": rank})
        return status
    except SignalException as stop:
        return 128 + stop.sigval
    except (DistError, RendezvousError) as error:
        reason = " ".join(str(error).split())
        kind, status = "lost", LOST_RANK_STATUS
        message = f"the launchers of the nodes cannot reach each other ({reason[:200]})"
        if "EADDRINUSE" in reason:
            kind, status = "user", 1
            message = (
                f"this node's MASTER_PORT is in use ({reason[:200]}); name a free one on all nodes"
            )
        with contextlib.suppress(OSError):
            failure = {"kind": kind, "message": message}
            write_json(Path(sys.argv[-1]).parent / "failure.node.json", failure)
        return status
    return 0


def forward_signal(signum: int, frame: object) -> None:
    """Pass a signal on to the processes of this node; exit if there are none yet.

    It imports nothing, since a second signal may arrive meanwhile.
    """
    children = psutil.Process().children()
    if not children:
        raise SystemExit(128 + signum)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signum)


def first_reason(statuses: Mapping[int, int]) -> tuple[int, int]:
    """Rank and status of the first process that ended for its own reason.

    `statuses` are by process, in the order in which torchrun noticed them. A process killed by
    signal n (status -n) gives 128 + n.
    """
    for rank, status in statuses.items():
        if status == REQUEUE_STATUS:  # all have saved; torchrun ends the last ones
            return rank, status
    causes = (item for item in statuses.items() if item[1] != LOST_RANK_STATUS)
    rank, status = next(causes, next(iter(statuses.items())))
    return rank, 128 - status if status < 0 else status
