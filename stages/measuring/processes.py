"""Runs a point in a process of its own, and tells the lack of memory from other failures."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bosch.errors import RunError, UserError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
# Counts what Linux killed for want of memory, on the whole machine.
_KERNEL_COUNTS = Path("/proc/vmstat")


def run_point(request: dict[str, Any], what: str) -> dict[str, Any]:
    """Figures of one run, or {"out_of_memory": reason}; `what` names the point in messages.

    Raises UserError or RunError with the sentence the process left, RunError for any other end.
    """
    with tempfile.TemporaryDirectory(prefix="bosch-measure-") as folder:
        asked, answer, log = (Path(folder) / n for n in ("asked.json", "answer.json", "log"))
        asked.write_text(json.dumps(request))
        command = [sys.executable, "-m", "stages.measuring.point", str(asked), str(answer)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        killed_before = _killed_by_kernel()
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        told = log.read_text(encoding="utf-8", errors="replace").strip()
        if done.returncode == 0:
            return _answer(json.loads(answer.read_text()))
        reason = _lack_of_memory(done.returncode, told, killed_before)
        if reason is not None:
            return {"out_of_memory": reason}
        logger.error("%s", told)
        last = told.splitlines()[-1] if told else "it said nothing"
        raise RunError(f"measuring {what} failed with status {done.returncode}: {last[:300]}")


def _answer(result: dict[str, Any]) -> dict[str, Any]:
    status, reason = result.pop("status"), result.get("reason")
    if status == "user_error":
        raise UserError(reason)
    if status == "run_error":
        raise RunError(reason)
    return {"out_of_memory": reason} if status == "out_of_memory" else result


def _killed_by_kernel() -> int | None:
    """How many processes Linux has killed for want of memory; None where it does not say."""
    try:
        lines = _KERNEL_COUNTS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _lack_of_memory(status: int, told: str, killed_before: int | None) -> str | None:
    """Why a process that left no answer had no memory; None when it ended by something else."""
    if status == -signal.SIGKILL:
        now = _killed_by_kernel()
        if now is None or killed_before is None or now > killed_before:
            return "killed by the system for want of memory"
    if status == -signal.SIGABRT and "std::bad_alloc" in told:
        return "std::bad_alloc"
    return None
