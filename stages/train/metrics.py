"""metrics.jsonl and tensorboard of training, and its speed and memory."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bosch.budget import window_shares
from bosch.hardware import device_named
from bosch.journal import Journal
from bosch.model.configuration import hybrid_mask
from bosch.score.decoder_shape import DecoderShape
from stages.formats import format_bytes, format_seconds
from stages.published import TENSORBOARD
from stages.train.schedule import Schedule
from stages.train.stage import METRICS, TrainConfig, TrainingStep

logger = logging.getLogger(__name__)


# Further fields in a step's line of the log.
_NOTED: dict[str, Callable[[Any], str]] = {
    "mfu": "MFU {:.1%}".format, "memory": format_bytes, "answers": "answers {:.3f}".format,
}  # fmt: skip


class MetricsLog:
    """One record per step on disk, in tensorboard and in the log.

    Records of steps after `done_steps`, the restart point, are removed. If records of earlier steps
    are lost, because their lines are damaged, training continues without them.
    """

    def __init__(self, work_dir: Path, schedule: Schedule, done_steps: int) -> None:
        self._journal = Journal(work_dir / METRICS)
        records = self._journal.read_new(_step)
        self.records = [record for record in records if record["step"] <= done_steps]
        if len(self.records) < done_steps:
            logger.warning(
                "%s holds %d of the %d steps done; the others have no record",
                METRICS, len(self.records), done_steps,
            )  # fmt: skip
        self._schedule = schedule
        self._done_steps = done_steps
        self._seconds_before = self.records[-1]["seconds"] if self.records else 0.0
        self._started = time.monotonic()
        self._journal.replace(self.records)
        from torch.utils.tensorboard import SummaryWriter

        # Events from `purge_step` on are void.
        self._tensorboard = SummaryWriter(str(work_dir / TENSORBOARD), purge_step=done_steps + 1)

    @property
    def final_loss(self) -> float | None:
        """Loss of the schedule's last step; None if its record is lost, or it was not finite."""
        record = self.records[-1] if self.records else None
        return record["loss"] if record and record["step"] == self._schedule.steps else None

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a restart included."""
        return self._seconds_before + time.monotonic() - self._started

    def begin(self) -> None:
        """Start the clock, so that speed and remaining time do not include loading."""
        self._started = time.monotonic()

    def write(self, step: int, loss: float, grad_norm: float, **values: Any) -> None:
        """Record step `step` (from 1); `values` are further fields of `TrainingStep`."""
        new_steps, seconds = step - self._done_steps, max(time.monotonic() - self._started, 1e-9)
        record = {
            "step": step,
            "tokens": step * self._schedule.batch_tokens,
            "loss": _finite(loss),
            "grad_norm": _finite(grad_norm),
            "seconds": round(self.seconds, 3),
            "seconds_left": round(seconds / new_steps * (self._schedule.steps - step), 3),
            **{name: _finite(value) for name, value in values.items() if value is not None},
        }
        self.records.append(record)
        self._journal.append(record)
        for name, value in record.items():
            if value is not None and name not in ("step", "tokens", "seconds"):
                self._tensorboard.add_scalar(f"train/{name}", float(value), step)
        logger.info(
            "step %d/%d: loss %.4f, lr %.2e, grad norm %.3f, %s tokens/s%s, %s left",
            step, self._schedule.steps, loss, record["learning_rate"], grad_norm,
            f"{new_steps * self._schedule.batch_tokens / seconds:,.0f}",
            "".join(f", {text(record[key])}" for key, text in _NOTED.items() if key in record),
            format_seconds(record["seconds_left"]),
        )  # fmt: skip

    def close(self) -> None:
        self._tensorboard.close()


def _step(record: dict[str, Any]) -> dict[str, Any]:
    """The record; raises ValueError if it is not a step's."""
    TrainingStep.model_validate(record)
    return record


def _finite(value: Any) -> Any:
    """The value, or None for a number that JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step_flops(config: Any, schedule: Schedule, train: TrainConfig) -> float:
    """Operations of a step on a hybrid of `config`, forward and backward, without recomputation.

    A teacher's forward pass is included. A packed sequence counts as one document; under document
    masking there are fewer operations.
    """
    shape, tokens, length = DecoderShape.of(config), schedule.batch_tokens, schedule.sequence_length
    teacher = shape.forward_flops(tokens, length) if train.teacher != "none" else 0.0
    return shape.training_flops(tokens, length, window_shares(hybrid_mask(config).layers)) + teacher


def peak_flops(processes: int) -> float | None:
    """Operations per second of all GPUs by the vendor's data sheet; None if unknown."""
    if not torch.cuda.is_available():
        return None
    device = device_named(torch.cuda.get_device_name())
    return None if device is None else device.tflops * 1e12 * processes


def peak_memory() -> int:
    """Peak bytes of this process so far, on its GPU or, without one, on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """Seconds since the last reading, in total and by named block."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._by_name: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._by_name[name] += time.monotonic() - started

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last reading, in total and by name; restarts the count."""
        read_at = time.monotonic()
        seconds, by_name = read_at - self._started, dict(self._by_name)
        self._started = read_at
        self._by_name.clear()
        return seconds, by_name
