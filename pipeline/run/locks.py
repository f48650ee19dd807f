"""One lock per stage output, held by flock while its process lives.

The kernel gives the flock back when its holder dies. The file names the holder: for messages, and
because a free flock shows a holder to be dead only where that holder ran beside us. Not every file
system tells other machines of a flock, so that what a process elsewhere left is not taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bosch.errors import RunError
from bosch.files import read_json

WAIT_SECONDS = 0.5
# Looking at a lock (`read_holder`) takes it for an instant; whoever wants it tries again.
_ATTEMPTS, _ATTEMPT_SECONDS = 5, 0.02
# The PID namespace of a machine itself, of none of its containers (Linux: PROC_PID_INIT_INO).
MACHINE_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, or left it behind."""

    pid: int
    host: str
    boot: str
    pid_namespace: str
    since: float
    recipe: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def beside_us(self) -> bool:
        """Whether it ran where a free flock shows that it is dead.

        That is this PID namespace, or this machine before it was started anew.
        """
        here = this_process("")
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return self.pid_namespace == here.pid_namespace == MACHINE_NAMESPACE
        return self.pid_namespace == here.pid_namespace


@contextlib.contextmanager
def hold(path: Path, what: str, recipe: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` during a block; it is gone afterwards.

    Raises RunError naming the holder when another process has it, or has left it and cannot be
    shown to be dead; with `wait`, waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = False
    while isinstance(lock := _try_acquire(path), str):
        if not wait:
            raise RunError(f"{what} {lock}")
        if not waiting:
            print(f"waiting: {what} {lock}", flush=True)
            waiting = True
        time.sleep(WAIT_SECONDS)
    try:
        os.truncate(lock, 0)
        os.write(lock, json.dumps(asdict(this_process(recipe))).encode())
        yield
    finally:
        _release(path, lock)


@contextlib.contextmanager
def hold_briefly(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during a block that is over in an instant; waits for others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while (lock := _open_locked(path)) is None:
        time.sleep(_ATTEMPT_SECONDS)
    try:
        yield
    finally:
        _release(path, lock)


def read_holder(path: Path) -> Holder | None:
    """Who holds a lock, or has left it and cannot be shown to be dead; None when nobody."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse(path)
    finally:
        os.close(lock)
    holder = _parse(path)
    return None if holder is None or holder.beside_us else holder


def _try_acquire(path: Path) -> int | str:
    """The descriptor of the lock, now held; else who has it and what to do, as half a sentence."""
    for _ in range(_ATTEMPTS):
        lock = _open_locked(path)
        if lock is not None:
            break
        time.sleep(_ATTEMPT_SECONDS)
    holder = _parse(path)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder else ""
    if lock is None:
        name = f"{holder} (recipe {holder.recipe}, since {since})" if holder else "another process"
        return f"is being made by {name}; wait for it, or pass --wait"
    if holder is None or holder.beside_us:
        return lock
    os.close(lock)
    return (
        f"was begun by {holder} (recipe {holder.recipe}, since {since}), and nothing here shows "
        f"whether that process still runs; wait for it, or delete {path} if it is gone"
    )


def _open_locked(path: Path) -> int | None:
    """The descriptor of the file with its flock; None where another process has it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An earlier holder has removed the file that was opened, perhaps for another one.
            if _is_at(path, lock):
                return lock
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError as error:
            os.close(lock)
            raise RunError(
                f"{path}: cannot be locked ({error.strerror}); put runtime.output_root on a file "
                "system with locks"
            ) from None


def _is_at(path: Path, lock: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False


def _release(path: Path, lock: int) -> None:
    """Remove the file, unless somebody has already and it is another's now; give the flock back."""
    if _is_at(path, lock):
        path.unlink()
    os.close(lock)


def _parse(path: Path) -> Holder | None:
    """The holder that a lock file names; None if torn: it died before it began to work."""
    content = read_json(path)
    try:
        return Holder(**content)
    except TypeError:
        return None


def this_process(recipe: str) -> Holder:
    """The entry of this process in a lock of `recipe`'s run."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux, and no namespaces
        boot = namespace = ""
    return Holder(os.getpid(), socket.gethostname(), boot, namespace, time.time(), recipe)
