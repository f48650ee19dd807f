"""Logging, configured once per process: the terminal for rank 0, a file for every rank."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

from bosch.errors import printable

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_CLOCK = "%H:%M:%S"


class _Formatter(logging.Formatter):
    """Escapes control characters: messages quote names from files of unknown origin."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_any_character() -> None:
    """Write characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence_imports(level: str = "debug") -> None:
    """Drop warnings of torchao, torch and transformers about kernels and options not used here.

    Sets a filter, too, since torch resets the levels of its loggers when it is imported.
    """
    if level != "debug":
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def _is_for_terminal(record: logging.LogRecord) -> bool:
    """Whether a record is a warning or progress; steps are only in the stage's log file."""
    return record.levelno >= logging.WARNING or record.name == "bosch.progress"


def configure(level: str, file: Path | None = None, rank: int = 0) -> None:
    """Set up the root logger; other ranks show only warnings on the terminal, with their number.

    Everything at `level` and above is appended to `file`. The first rank's terminal shows warnings
    and progress.
    """
    # A log line on a full disk must not print a traceback over the run's message.
    logging.raiseExceptions = False
    prefix = f"[rank {rank}] " if rank else ""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(_Formatter(prefix + _FORMAT, _CLOCK))
    terminal.setLevel(logging.WARNING if rank else level.upper())
    terminal.addFilter(_is_for_terminal)
    handlers: list[logging.Handler] = [terminal]
    if file is not None:
        log_file = logging.FileHandler(file, encoding="utf-8")
        log_file.setFormatter(_Formatter(_FORMAT))
        handlers.append(log_file)
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    for name in ("filelock", "fsspec", "PIL", "urllib3", "httpx", "h5py"):
        logging.getLogger(name).setLevel(logging.WARNING)
    silence_imports(level)


def stage_log(work_dir: Path, rank: int) -> Path:
    """The log file of one rank in a stage's work directory; it is published with the output."""
    return work_dir / ("stage.log" if rank == 0 else f"stage.rank{rank}.log")
