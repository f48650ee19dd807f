"""metrics.jsonl and tensorboard, both cut back to the restart point when training resumes."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from stages.output import write_text
from stages.reporting.formats import format_seconds
from stages.training.schedule import Schedule

logger = logging.getLogger(__name__)


def read_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The records of steps up to `last_step`, less what a killed process left half written."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[:last_step]:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(record, dict) or record.get("step") != len(records) + 1:
            break
        records.append(record)
    return records


class MetricsLog:
    """One record per step on disk, in tensorboard and in the log.

    Raises:
        RunError: metrics.jsonl has lost steps that the restart point counts as done.
    """

    def __init__(self, work_dir: Path, schedule: Schedule, done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = work_dir / "metrics.jsonl"
        self.records = read_metrics(path, done_steps)
        if len(self.records) < done_steps:
            raise RunError(
                f"{path}: damaged, it holds {len(self.records)} of the {done_steps} steps done; "
                "train again from the start with --force train"
            )
        self._schedule = schedule
        self._done_steps = done_steps
        self._seconds_before = self.records[-1]["seconds"] if self.records else 0.0
        self._started = time.monotonic()
        write_text(path, "".join(json.dumps(r) + "\n" for r in self.records))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(work_dir / "tensorboard"), purge_step=done_steps + 1)

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a restart included."""
        return self._seconds_before + time.monotonic() - self._started

    def write(self, step: int, loss: float, learning_rate: float, grad_norm: float) -> None:
        """Record step `step` (from 1)."""
        record = {
            "step": step,
            "tokens": step * self._schedule.batch_tokens,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "seconds": round(self.seconds, 3),
        }
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name in ("loss", "learning_rate", "grad_norm"):
            self._board.add_scalar(f"train/{name}", record[name], step)
        self._log_line(record)

    def _log_line(self, record: dict[str, Any]) -> None:
        new_steps = record["step"] - self._done_steps
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = seconds / new_steps * (self._schedule.steps - record["step"])
        logger.info(
            "step %d/%d: loss %.4f, lr %.2e, grad norm %.3f, %s tokens/s, %s left",
            record["step"],
            self._schedule.steps,
            record["loss"],
            record["learning_rate"],
            record["grad_norm"],
            f"{new_steps * self._schedule.batch_tokens / seconds:,.0f}",
            format_seconds(left),
        )

    def close(self) -> None:
        self._file.close()
        self._board.close()
