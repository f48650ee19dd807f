"""One lock per stage output: held by a process, taken over when that process is dead."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bosch.errors import RunError
from pipeline.files import read_json, write_json

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock; its start time tells it from a later one of the same pid."""

    pid: int
    start_time: int
    host: str
    boot: str
    since: float
    recipe: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def local(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """False only when it is certain that the process is gone."""
        if not self.local:
            return True
        if not self.start_time:
            return _signalled(self.pid)
        return self.boot == _boot() and _start_time(self.pid) == self.start_time


def read_holder(path: Path) -> Holder | None:
    """Who holds a lock; None when nobody living does. A torn lock file counts as dead."""
    holder = _parse(path)
    return holder if holder is not None and holder.alive else None


@contextlib.contextmanager
def hold(path: Path, what: str, recipe: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` during a block.

    Raises RunError naming the holder when another living process has it; with `wait`, waits.
    """
    mine = Holder(
        os.getpid(), _start_time(os.getpid()), socket.gethostname(), _boot(), time.time(), recipe
    )
    told = False
    while (other := _try_acquire(path, mine)) is not None:
        if not wait:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other.since))
            remedy = (
                "wait for it, or pass --wait"
                if other.local
                else f"wait for it, or delete {path} if that process is gone"
            )
            raise RunError(
                f"{what} is being made by {other} (recipe {other.recipe}, since {since}); {remedy}"
            )
        if not told:
            print(f"waiting: {what} is being made by {other}", flush=True)
            told = True
        time.sleep(_WAIT_SECONDS)
    try:
        yield
    finally:
        if _parse(path) == mine:
            path.unlink(missing_ok=True)


def _try_acquire(path: Path, mine: Holder) -> Holder | None:
    """Take the lock, over a dead holder if need be; otherwise return who has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The guard keeps two processes of this host from both taking over the same dead lock; across
    # hosts only os.link decides, and the locks of other hosts are never taken over.
    with path.with_suffix(".guard").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        write_json(temporary, asdict(mine))
        try:
            while True:
                other = _parse(path)
                if other is not None and other.alive:
                    return other
                if other is not None:
                    logger.info("taking over the lock of %s, which is gone", other)
                path.unlink(missing_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
                    return None
        finally:
            temporary.unlink(missing_ok=True)


def _parse(path: Path) -> Holder | None:
    content = read_json(path)
    try:
        return Holder(**content)
    except TypeError:
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _signalled(pid: int) -> bool:
    """Whether a process of this pid exists, where no start times can be read (no /proc)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_time(pid: int) -> int:
    """Clock ticks after boot at which a process started; 0 when none is there or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])
