"""This process: its number among others, its signals, and its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_KERNEL_COUNTS = Path("/proc/vmstat")


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """The given signals without those that are ignored, as under nohup or a script's &."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


# Signals on which a run saves its work and ends: a scheduler's, and a closing terminal's.
STOP_SIGNALS = heeded(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def world_size() -> int:
    """Number of processes of this run on all nodes, from torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Number of processes of this run on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def die_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when process `parent` ends, which may have ended already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def killed_by_kernel(counts: Path = _KERNEL_COUNTS) -> int | None:
    """Number of processes killed so far because memory ran out; None if it is unknown."""
    try:
        lines = counts.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
