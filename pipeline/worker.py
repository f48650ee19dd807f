"""The process a stage runs in: `python -m pipeline.worker ORDER`, alone or under torchrun.

ORDER is a JSON file that the runner wrote: what to run, its config, inputs and work directory, and
where to leave the summary or the reason of a failure.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import LostRankError, RunError, UserError
from pipeline import log
from pipeline.files import write_json

logger = logging.getLogger(__name__)

PARENT = "BOSCH_PARENT_PID"
DISK_FULL_STATUS = 28
# Of a process that only lost another one of its stage.
LOST_RANK_STATUS = 75
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)


def execute(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stage that an order names and return its summary."""
    from stages.context import StageConfig

    config = StageConfig(
        section=_section(order["section"]),
        model=_section(order["model"]),
        seed=order["seed"],
        runtime=_section(order["runtime"]),
        upstream={name: _section(one) for name, one in order["upstream"].items()},
        shared=Path(order["shared"]) if order.get("shared") else None,
    )
    module, _, name = str(order["function"]).partition(":")
    function = getattr(importlib.import_module(module), name)
    inputs = {stage: Path(folder) for stage, folder in order["inputs"].items()}
    summary = function(config, inputs, Path(order["work_dir"]))
    json.dumps(summary, allow_nan=False)
    return dict(summary)


def _section(order: Mapping[str, Any]) -> Any:
    module, _, name = str(order["type"]).partition(":")
    return getattr(importlib.import_module(module), name).model_validate(order["values"])


def describe(error: BaseException, work_dir: Path, log_file: Path) -> dict[str, str]:
    """Kind (user, run, unexpected) and sentence of a failure."""
    if isinstance(error, UserError):
        return {"kind": "user", "message": str(error)}
    if is_disk_full(error):
        return {"kind": "run", "message": disk_full_sentence(work_dir)}
    if isinstance(error, RunError):
        return {"kind": "run", "message": str(error)}
    if isinstance(error, MemoryError):
        return {"kind": "run", "message": "out of memory; see runtime for smaller batches"}
    reason = " ".join(str(error).split())[:300]
    message = f"unexpected {type(error).__name__}: {reason}; the traceback is in {log_file}"
    return {"kind": "unexpected", "message": message}


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or quota is behind an error; libraries wrap it in errors of their own."""
    return any(
        (isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT))
        or "No space left on device" in str(one)
        for one in _chain(error)
    )


def disk_full_sentence(folder: Path) -> str:
    """What to do about a full disk."""
    return (
        f"the disk of {folder} is full; free some space and run the same command again: "
        "the work done so far is kept"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def main() -> int:
    """Run one order; 0 when done, 2 for the user's fault, 1 for a failure, else a named status."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    work_dir, control = Path(order["work_dir"]), Path(sys.argv[1]).parent
    log_file = log.stage_log(work_dir, rank)
    try:
        log.configure(order["log_level"], log_file, rank)
        summary = execute(order)
        if rank == 0:
            write_json(control / "summary.json", summary)
        return 0
    except KeyboardInterrupt:
        return 130
    except LostRankError as error:
        logger.error("%s", error)
        return LOST_RANK_STATUS
    except Exception as error:
        failure = describe(error, work_dir, log_file)
        if failure["kind"] == "unexpected":
            _write_traceback(log_file)
        try:
            write_json(control / f"failure.{rank}.json", failure)
        except OSError:
            print(failure["message"], file=sys.stderr)
        if is_disk_full(error):
            return DISK_FULL_STATUS
        return 2 if failure["kind"] == "user" else 1


def _interrupt(signum: int, frame: object) -> None:
    """End as Ctrl-C does, so that helpers a stage has forked are ended with it."""
    raise KeyboardInterrupt


def _write_traceback(log_file: Path) -> None:
    try:
        with log_file.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
    except OSError:
        traceback.print_exc()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Without the interpreter's own shutdown: threads of data loaders and process groups left by a
    # stage that failed can hang there, and with them the whole job.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status) if status else sys.exit(0)
