"""torchrun for `pipeline.run.worker`: without its tracebacks, and patient while work is saved.

Its arguments are torchrun's options and the worker's command, which ends with the order's file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import psutil

from bosch.files import write_json
from bosch.this_process import STOP_SIGNALS, heeded
from pipeline.run import failures
from pipeline.run.worker import PARENT, die_with_runner


def main() -> int:
    """Start the processes of this node and wait for them; returns 0 if all succeed."""
    die_with_runner()
    os.environ[PARENT] = str(os.getpid())
    # torchrun would kill processes that save their work after 30 seconds.
    for number in STOP_SIGNALS:
        signal.signal(number, forward_signal)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    names = ",".join(number.name for number in heeded(signal.SIGINT, signal.SIGQUIT))
    try:
        torchrun([f"--signals-to-handle={names}", *sys.argv[1:]])
        return 0
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda failure: failure[1].timestamp)
        failure = failures.ended(f"process {rank}", first.exitcode)
    except SignalException as stop:
        return 128 + stop.sigval
    except (DistError, RendezvousError) as error:
        reason = " ".join(str(error).split())[:200]
        failure = {"kind": "lost", "message": f"the nodes do not reach each other ({reason})"}
    with contextlib.suppress(OSError):
        write_json(Path(sys.argv[-1]).parent / "failure.launcher.json", failure)
    return 1


def forward_signal(signum: int, frame: object) -> None:
    """Pass a signal on to the processes of this node; exit if there are none yet.

    It imports nothing, since a second signal may arrive meanwhile.
    """
    children = psutil.Process().children()
    if not children:
        raise SystemExit(1)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signum)
