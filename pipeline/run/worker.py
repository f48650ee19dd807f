"""The process a stage runs in, alone or under torchrun: its argument is the file ORDER.

ORDER is the runner's JSON file with the stage's function, config, inputs and work directory. The
summary, or the reason of a failure, is written beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bosch.files import write_json
from bosch.this_process import STOP_SIGNALS, die_with_parent, heeded
from pipeline.run import failures, log
from stages.context import StageConfig

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


def run_forked(order: str, env: Mapping[str, str]) -> NoReturn:
    """Run an order in a fork of the runner, which has the modules of a stage already."""
    os.environ.update(env)
    sys.argv[1:] = [order]
    for number in heeded(signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    main()


def main() -> NoReturn:
    """Run the order and end the process, with status 0 only after success."""
    status = _run_order()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Skip the interpreter's shutdown: threads of data loaders and process groups of a failed
    # stage can hang there, and gloo's threads can abort a finished process ("terminate called
    # without an active exception").
    os._exit(status)


def _run_order() -> int:
    die_with_runner()
    # So do helpers that the stage forks (tokenising, data loading), if it is killed.
    os.register_at_fork(after_in_child=die_with_parent)
    log.show_any_character()
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    work_dir, control = Path(order["work_dir"]), Path(sys.argv[1]).parent
    log_file = log.stage_log(work_dir, rank)
    try:
        log.configure(order["log_level"], log_file, rank)
        try:
            summary = execute(order)
        finally:
            # torchrun stops all ranks when one has failed, also while one writes its reason.
            failures.ignore_stops()
        if rank == 0:
            write_json(control / "summary.json", summary)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        failure = failures.describe(error, work_dir, log_file)
        try:
            write_json(control / f"failure.{rank}.json", failure)
        except OSError:
            print(failure["message"], file=sys.stderr)
        return 1


def interrupt(signum: int, frame: object) -> None:
    """End as on Ctrl-C, so that forked helpers of a stage are ended, too."""
    raise KeyboardInterrupt
