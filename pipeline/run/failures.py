"""Kinds, messages and exit statuses of failures."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from pathlib import Path

from bosch.errors import (
    NO_SPACE_LEFT,
    DamagedWorkError,
    LostRankError,
    RunError,
    UserError,
    causes,
    is_disk_full,
    is_out_of_memory,
)
from bosch.this_process import STOP_SIGNALS

DISK_FULL_STATUS = 28
OUTPUT_FULL = "the standard output cannot be written to: no space is left where it leads"
NO_SPACE = "no space is left on the disk that is written to; free some and run the command again"
FILE_TOO_LARGE = (
    "a file grew beyond what the file system or the shell's limit allows; choose another "
    "runtime.output_root or --output, or raise the limit with ulimit -f, and run the same command "
    "again"
)
# Status of a process that only lost another process of its stage, and of a command with a lost
# process: the same command resumes.
LOST_RANK_STATUS = 76
ENDED = "ended.json"  # file with the process that ended first
# EX_TEMPFAIL of sysexits.h: the run was asked to stop and has saved its work.
REQUEUE_STATUS = 75


class Terminated(BaseException):
    """A stop signal arrived at the command; like Ctrl-C, no fault of the interrupted code."""


def ignore_stops() -> None:
    """Ignore stop signals from here on, except SIGKILL."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def describe(error: BaseException, work_dir: Path, log_file: Path) -> dict[str, str]:
    """Kind and message of a stage's failure, for the runner.

    Kinds: user, damaged, disk, run, unexpected, and lost if another process ended or hangs.
    """
    kinds = {UserError: "user", DamagedWorkError: "damaged", LostRankError: "lost"}
    for error_type, kind in kinds.items():
        if isinstance(error, error_type):
            return {"kind": kind, "message": str(error)}
    if (message := no_space(error, work_dir)) is not None:
        return {"kind": "disk" if is_disk_full(error) else "run", "message": message}
    if isinstance(error, RunError):
        return {"kind": "run", "message": str(error)}
    if is_out_of_memory(error):
        return {"kind": "run", "message": "out of memory; see runtime for smaller batches"}
    return {"kind": "unexpected", "message": unexpected(error, log_file)}


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


def no_space(error: BaseException, folder: Path | None) -> str | None:
    """Message if a disk or quota is full, or a file may not grow; None for other errors.

    `folder` is where the run writes, unless the error names a file.
    """
    if not is_disk_full(error):
        numbers = [cause.errno for cause in causes(error) if isinstance(cause, OSError)]
        return FILE_TOO_LARGE if errno.EFBIG in numbers else None
    full = _full_folder(error)
    if full is None and output_is_full():
        return OUTPUT_FULL
    if full is None or (folder is not None and folder in full.parents):
        full = folder
    return NO_SPACE if full is None else disk_full_message(full)


def _full_folder(error: BaseException) -> Path | None:
    """The folder of the file for which no space was left, if the error names it."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in NO_SPACE_LEFT:
            name = cause.filename2 or cause.filename  # the second name is the target of a copy
            if isinstance(name, str | bytes):
                parents = Path(os.path.abspath(os.fsdecode(name))).parents
                return next(path for path in parents if path.is_dir())
    return None


def output_is_full() -> bool:
    """Whether the standard output has no space left, rather than a folder of the run.

    It only flushes the buffer, since programs may read the output. If that fails, the output is
    redirected to nowhere, because the interpreter would try again at its end.
    """
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def disk_full_message(folder: Path) -> str:
    """Message for a disk without space or inodes, with advice."""
    advice = "and run the same command again: the work done so far is kept"
    with contextlib.suppress(OSError):
        space = os.statvfs(folder)
        if space.f_files and not space.f_favail:
            return f"the disk of {folder} has no inode left; remove some files {advice}"
    return f"the disk of {folder} is full; free some space {advice}"
