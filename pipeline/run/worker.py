"""The process a stage runs in, alone or under torchrun: its argument is the file ORDER.

ORDER is the runner's JSON file with the stage's function, config, inputs and work directory, and
the paths for the summary or the reason of a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from bosch.errors import StoppedError
from bosch.files import write_json
from bosch.this_process import STOP_SIGNALS, die_with_parent
from pipeline.run import failures, log
from pipeline.run.heartbeat import heartbeats
from stages.context import StageConfig

logger = logging.getLogger(__name__)

PARENT = "BOSCH_PARENT_PID"


def die_with_runner() -> None:
    """Have the kernel kill this process when its parent ends."""
    die_with_parent(int(os.environ[PARENT]) if PARENT in os.environ else None)


def execute(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stage of an order and return its summary."""
    config: StageConfig[Any] = StageConfig(
        section=_section(order["section"]),
        model=_section(order["model"]),
        seed=order["seed"],
        runtime=_section(order["runtime"]),
        upstream={name: _section(section) for name, section in order["upstream"].items()},
        shared=Path(order["shared"]) if order.get("shared") else None,
        model_identity=order.get("model_identity"),
        stamps=order.get("stamps", {}),
        other_stages=tuple(order.get("other_stages", ())),
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


def main() -> NoReturn:
    """Run the order and end the process, with status 0 only after success."""
    try:
        status = _run_order()
    except _Signalled as stop:
        status = 128 + stop.number
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Skip the interpreter's shutdown: threads of data loaders and process groups of a failed
    # stage can hang there, and gloo's threads can abort a finished process ("terminate called
    # without an active exception").
    os._exit(status)


def _run_order() -> int:
    """Exit status: 0 done, 2 invalid input, 1 a failure, else a status of `failures`."""
    die_with_runner()
    log.show_any_character()
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    sys.unraisablehook = interrupt_again
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    work_dir, control = Path(order["work_dir"]), Path(sys.argv[1]).parent
    log_file = log.stage_log(work_dir, rank)
    try:
        log.configure(order["log_level"], log_file, rank)
        try:
            minutes = _section(order["runtime"]).collective_timeout_minutes
            with heartbeats(minutes, partial(_end_after_silence, control, rank)):
                summary = execute(order)
        finally:
            # torchrun stops all ranks when one has failed, also while one writes its reason.
            failures.ignore_stops()
        if rank == 0:
            write_json(control / "summary.json", summary)
        return 0
    except StoppedError as stop:
        logger.info("%s", stop)
        return failures.REQUEUE_STATUS
    except Exception as error:
        failure = failures.describe(error, work_dir, log_file)
        is_in_status = failure["kind"] == "disk" and failure["message"] != failures.OUTPUT_FULL
        _write_failure(control / f"failure.{rank}.json", failure, is_in_status)
        if is_in_status:
            return failures.DISK_FULL_STATUS
        return {"user": 2, "lost": failures.LOST_RANK_STATUS}.get(failure["kind"], 1)


def _write_failure(file: Path, failure: Mapping[str, str], is_in_status: bool = False) -> None:
    """Write the failure for the runner; if that fails, print it unless `is_in_status`."""
    if failure["kind"] in ("lost", "frozen"):
        logger.error("%s", failure["message"])
    try:
        write_json(file, failure)
    except OSError:
        if not is_in_status:
            print(failure["message"], file=sys.stderr)


def _end_after_silence(control: Path, rank: int, message: str) -> None:
    """End the process from a thread, since its main thread waits for a frozen process."""
    _write_failure(control / f"failure.{rank}.frozen.json", {"kind": "frozen", "message": message})
    os._exit(failures.LOST_RANK_STATUS)


class _Signalled(KeyboardInterrupt):
    """A signal that ends the process like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupt(signum: int, frame: object) -> None:
    """End as on Ctrl-C, so that forked helpers of a stage are ended, too."""
    raise _Signalled(signum)


def interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a signal whose exception was lost in a destructor or in a callback of an import."""
    if isinstance(lost.exc_value, _Signalled):
        # An exception here would be lost again.
        threading.Timer(0.05, os.kill, (os.getpid(), lost.exc_value.number)).start()
    else:
        sys.__unraisablehook__(lost)
