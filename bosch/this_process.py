"""Identity of this process among machines and containers, and its signals."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_PR_SET_PDEATHSIG = 1
_KERNEL_COUNTS = Path("/proc/vmstat")


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """The given signals without those that are ignored, as under nohup or a script's &."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


# Signals on which a run saves its work and ends: a scheduler's, and a closing terminal's.
STOP_SIGNALS = heeded(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def boot_id() -> str:
    """Identifier of a start of the kernel; empty without Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Namespace of process numbers; empty without Linux."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def machine_id() -> str:
    """The system's machine-id, which survives a restart, else a network card's address."""
    for path in _MACHINE_IDS:
        with contextlib.suppress(OSError, ValueError):
            text = Path(path).read_text(encoding="ascii").strip()
            if text:
                return text
    return f"{uuid.getnode():012x}"


@functools.cache
def process_place() -> str:
    """Short name of the kernel and namespace in which process numbers are valid."""
    where = f"{boot_id() or machine_id()} {pid_namespace()}"
    return hashlib.sha256(where.encode()).hexdigest()[:8]


def is_alive(pid: int) -> bool:
    """Whether a process of this number exists in this `process_place`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def world_size() -> int:
    """Number of processes of this run on all nodes, from torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Number of processes of this run on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def name_processes(ranks: Sequence[int]) -> str:
    """Names of processes for messages, with their nodes if there are several."""
    numbers = ", ".join(map(str, ranks))
    per_node = local_world_size()
    if world_size() == per_node:
        return f"process {numbers}"
    nodes = ", ".join(str(node) for node in sorted({rank // per_node for rank in ranks}))
    return f"node {nodes} (process {numbers})"


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
