"""Stages that write their inputs; environment variables make them fail, wait or grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.errors import RunError, StoppedError, UserError
from bosch.this_process import STOP_SIGNALS
from stages.context import StageConfig

VERSION = 1


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    name = type(config.section).__name__.removesuffix("Config").lower()
    rank = int(os.environ.get("RANK", 0))
    with (work_dir / f"calls.{rank}.txt").open("a") as file:
        file.write("called\n")
    print(f"stage {name} runs", flush=True)
    if os.environ.get("FAKE_HELPER") == name:
        helper = subprocess.Popen(["sleep", "60"])
        (Path(os.environ["FAKE_MARK"]) / "helper").write_text(str(helper.pid))
    if (os.environ.get("FAKE_SLEEP") or "").startswith(name):
        if os.environ.get("FAKE_SAVE") == name:
            for number in STOP_SIGNALS:
                signal.signal(number, _save_and_stop)
        (Path(os.environ["FAKE_MARK"]) / f"{name}.{rank}").write_text(str(os.getpid()))
        time.sleep(float(os.environ["FAKE_SLEEP"].partition("=")[2]))
    failing_stage, _, kind = os.environ.get("FAKE_FAIL", "").partition("=")
    if failing_stage == name:
        _fail(kind)
    if rank == 0:
        files = {
            stage: sorted(p.name for p in folder.iterdir()) for stage, folder in inputs.items()
        }
        content = {
            "section": config.section.model_dump(mode="json"),
            "seed": config.seed,
            "inputs": files,
            "upstream": sorted(config.upstream),
            "world": os.environ.get("WORLD_SIZE", "1"),
            "rounding": os.environ.get("FAKE_ROUNDING"),  # as results on a GPU differ
        }
        (work_dir / "output.json").write_text(json.dumps(content))
        if name == "evaluate":
            missing = json.loads(os.environ.get("FAKE_MISSING", "{}"))
            scores = {"checkpoints": {}, "missing": missing}
            (work_dir / "scores.json").write_text(json.dumps(scores))
    return {"stage": name, "rank": rank}


def leaves_a_fork(config: StageConfig, inputs: object, work_dir: Path) -> dict[str, Any]:
    """A stage that leaves a forked helper behind; another seed than 0 kills the stage."""
    helper = os.fork()
    if not helper:
        time.sleep(600)
    facts = {"argument": sys.argv[0], "parent": os.getppid(), "helper": helper}
    mark = os.environ["BOSCH_WORK_DIR"]
    (work_dir / "facts.json").write_text(json.dumps({**facts, "mark": mark}))
    if config.seed:
        os.kill(os.getpid(), signal.SIGKILL)
    return facts


def _fail(kind: str) -> None:
    """End like a stage that fails; each kind has its own message and exit status."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {
        "user": UserError("the corpus at x is empty; name another"),
        "run": RunError("the loss diverged"),
        "bug": KeyError("boom"),
    }[kind]


def _save_and_stop(signum: int, frame: object) -> None:
    """Save for longer than a runner waits after Ctrl-C, as training does."""
    time.sleep(3)
    raise StoppedError("saved")
