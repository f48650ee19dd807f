"""A lock for each stage output, held with flock while its process lives.

The kernel releases the flock when its holder dies. On some file systems a flock is not visible to
other machines, so a free flock shows that the holder is dead only if it ran on this machine; a lock
of a process elsewhere is not taken over. Therefore, and for messages, the file names its holder,
with boot and machine ids to distinguish machines of the same host name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bosch.errors import RunError
from bosch.files import read_json
from bosch.this_process import boot_id, machine_id, pid_namespace

WAIT_SECONDS = 0.5
# `read_holder` takes a lock for a moment to look at it, so acquiring is retried.
_ATTEMPTS, _ATTEMPT_SECONDS = 5, 0.02
# PID namespace of a machine outside of containers (Linux: PROC_PID_INIT_INO).
MACHINE_NAMESPACE = "pid:[4026531836]"


class Holder(BaseModel):
    """The process that holds a lock, or has left it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pid: int
    host: str
    boot: str
    pid_namespace: str
    since: float
    recipe: str
    machine: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def flock_is_reliable(self) -> bool:
        """Whether a free flock shows that the holder is dead.

        It does for this PID namespace of this kernel, and for this machine before its last boot.
        """
        current = this_process("")
        same_machine = (self.host, self.machine) == (current.host, current.machine)
        if self.boot != current.boot:
            namespaces = {self.pid_namespace, current.pid_namespace}
            return same_machine and namespaces == {MACHINE_NAMESPACE}
        # Boot ids exist only on Linux.
        return self.pid_namespace == current.pid_namespace and (same_machine or bool(current.boot))


@contextlib.contextmanager
def hold(path: Path, name: str, recipe: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` of the output `name` during the block; removes it afterwards.

    Raises RunError, which names the holder, if another process has it, or has left it and may be
    alive; with `wait` it waits instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = False
    while isinstance(lock := _try_acquire(path, wait), str):
        if not wait:
            raise RunError(f"{name} {lock}")
        if not waiting:
            print(f"waiting: {name} {lock}", flush=True)
            waiting = True
        time.sleep(WAIT_SECONDS)
    try:
        os.truncate(lock, 0)
        os.write(lock, this_process(recipe).model_dump_json().encode())
        yield
    finally:
        _release(path, lock)


@contextlib.contextmanager
def hold_briefly(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during a short block; waits for others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while (lock := _open_locked(path)) is None:
        time.sleep(_ATTEMPT_SECONDS)
    try:
        yield
    finally:
        _release(path, lock)


def read_holder(path: Path) -> Holder | None:
    """The holder, alive or possibly alive; None for a free lock."""
    lock = _open(path, os.O_RDONLY)
    if lock is None:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse(path)
    finally:
        os.close(lock)
    holder = _parse(path)
    return None if holder is None or holder.flock_is_reliable else holder


def _try_acquire(path: Path, wait: bool) -> int | str:
    """The descriptor of the lock if it was acquired; else a message with the holder and advice.

    With `wait` the advice is what to do besides waiting.
    """
    for _ in range(_ATTEMPTS):
        lock = _open_locked(path)
        if lock is not None:
            break
        time.sleep(_ATTEMPT_SECONDS)
    holder = _parse(path)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder else ""
    if lock is None:
        name = f"{holder} (recipe {holder.recipe}, since {since})" if holder else "another process"
        return f"is being made by {name}" + ("" if wait else "; wait for it, or pass --wait")
    if holder is None or holder.flock_is_reliable:
        return lock
    os.close(lock)
    return (
        f"was begun by {holder} (recipe {holder.recipe}, since {since}), and nothing here shows "
        f"whether that process still runs; {'' if wait else 'wait for it, or '}delete {path} if it "
        "is gone"
    )


def _open_locked(path: Path) -> int | None:
    """The descriptor of the file with its flock; None if another process has it."""
    while True:
        lock = _open(path, os.O_RDWR | os.O_CREAT)
        assert lock is not None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An earlier holder has removed, and another perhaps replaced, the opened file.
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


def _open(path: Path, flags: int) -> int | None:
    """The descriptor of a lock file, or None; raises RunError for a folder, a link or a pipe."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENOENT and not flags & os.O_CREAT:
            return None
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        status = os.fstat(lock)
        # A hard link could be another file, which a holder's entry would overwrite.
        if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
            return lock
        os.close(lock)
    raise RunError(f"{path} is a folder, link or pipe where the lock of a run should be; delete it")


def _is_at(path: Path, lock: int) -> bool:
    """Whether the open file still has this path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(lock))
    except FileNotFoundError:
        return False


def _release(path: Path, lock: int) -> None:
    """Remove the file, unless it is another process's file now; release the flock."""
    if _is_at(path, lock):
        path.unlink()
    os.close(lock)


def _parse(path: Path) -> Holder | None:
    """The holder in a lock file; None if it is torn, since the holder died before it began."""
    try:
        holder = Holder.model_validate(read_json(path))
        time.localtime(holder.since)
    except (ValueError, OverflowError, OSError):
        return None
    return holder


def this_process(recipe: str) -> Holder:
    """This process as holder, for a run of `recipe`."""
    return Holder(
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        since=time.time(),
        recipe=recipe,
        machine=machine_id(),
    )
