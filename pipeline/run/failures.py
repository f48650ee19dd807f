"""Kinds and messages of failures of a stage's processes."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path

from bosch.errors import (
    DiskFullError,
    LostRankError,
    RunError,
    StoppedError,
    UserError,
    causes,
    is_disk_full,
    is_out_of_memory,
)
from bosch.this_process import STOP_SIGNALS

# EX_TEMPFAIL of sysexits.h: the command was asked to stop; the same command resumes.
REQUEUE_STATUS = 75
_RESUMES = "the same command resumes from here"
# Errors by kind. If several processes failed, the first kind here is reported: libraries raise
# their own errors when another process was killed or lost.
KINDS: dict[str, type[Exception]] = {
    "user": UserError,
    "disk": DiskFullError,
    "run": RunError,
    "killed": LostRankError,
    "stopped": StoppedError,  # also by torchrun, once another process was killed
    "unexpected": RunError,
    "lost": LostRankError,
}


class Terminated(BaseException):
    """A stop signal arrived at the command; like Ctrl-C, no fault of the interrupted code."""


def ignore_stops() -> None:
    """Ignore stop signals from here on, except SIGKILL."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def describe(error: BaseException, work_dir: Path, log_file: Path) -> dict[str, str]:
    """Kind and message of a stage's failure, for the runner."""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        return {"kind": "stopped", "message": "stopped, its work is saved"}
    if isinstance(error, LostRankError):
        return {"kind": "lost", "message": f"{error}; {_RESUMES}"}
    if isinstance(error, UserError):
        return {"kind": "user", "message": str(error)}
    if is_disk_full(error):
        return {"kind": "disk", "message": no_space(error, work_dir)}
    if isinstance(error, RunError):
        return {"kind": "run", "message": str(error)}
    if is_out_of_memory(error):
        return {"kind": "run", "message": "out of memory; see runtime for smaller batches"}
    return {"kind": "unexpected", "message": unexpected(error, log_file)}


def ended(process: str, status: int) -> dict[str, str]:
    """Kind and message for a process that ended without a message; -n: by signal n."""
    if status >= 0:
        message = f"{process} ended with status {status} without a reason; see its output above"
        return {"kind": "lost", "message": message}
    name = signal.Signals(-status).name
    return {"kind": "killed", "message": f"{process} was ended by {name}; {_RESUMES}"}


def unexpected(error: BaseException, log_file: Path) -> str:
    """One line for an unexpected failure; its traceback is appended to `log_file`."""
    line = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return line
    return f"{line}; the traceback is in {log_file}"


def no_space(error: BaseException, folder: Path | None) -> str:
    """Message for a full disk: that of the file which the error names, else that of `folder`."""
    names = [
        os.fsdecode(name)
        for cause in causes(error)
        if isinstance(cause, OSError)
        and isinstance(name := cause.filename2 or cause.filename, str | bytes | Path)
    ]
    place = names[0] if names else folder
    disk = f"the disk of {place}" if place is not None else "the disk"
    return f"{disk} is full; free some space and run the same command again: the work is kept"
