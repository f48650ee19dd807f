"""Decisions at the end of a training step, the same on every process.

Whether to apply the update (a gradient that is not finite, or far larger than those before, is
skipped or ends the run), to write a restart point, and to stop.
"""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist

from bosch.this_process import STOP_SIGNALS
from stages.context import Runtime
from stages.train.stage import TrainConfig

_REMEMBERED = 100  # earlier steps whose gradient norms a step is compared with
_MIN_NORMS = 20  # with fewer steps, only a norm that is not finite is bad
MAX_BAD_IN_A_ROW = 5  # this many consecutive bad steps end the run
MAX_BAD_REMEMBERED = 10  # or this many among the last `_REMEMBERED`
_MIN_TIMED = 5  # steps before the timeout is computed from their time
TIMEOUT_FACTOR = 20  # of the median of the last steps
MIN_STEP_TIMEOUT = 2.0  # minutes


class SpikeRule:
    """Finds bad steps from the last steps' gradient norms; the same on every process."""

    def __init__(self, train: TrainConfig, steps: int) -> None:
        """`steps`: the number of steps of the whole run."""
        self._factor = train.spike_factor
        # In a short run half of the steps, since skipped steps train nothing.
        self._in_a_row, self._in_all = (
            min(limit, math.ceil(steps / 2)) for limit in (MAX_BAD_IN_A_ROW, MAX_BAD_REMEMBERED)
        )
        # Norm (None: not finite), and whether the step was bad. Spikes count in the median, so that
        # steps after a lasting rise are not spikes.
        self._steps: deque[tuple[float | None, bool]] = deque(maxlen=_REMEMBERED)

    @property
    def state(self) -> list[Any]:
        """The rule's state for a restart point, as JSON."""
        return [list(step) for step in self._steps]

    def restore(self, state: Iterable[Any]) -> None:
        """Continue from the `state` of a restart point."""
        self._steps.extend((norm, bad) for norm, bad in state)

    def judge(self, norm: float) -> str | None:
        """Record a step's gradient norm; returns its fault, or None."""
        fault = self._fault(norm)
        self._steps.append((norm if math.isfinite(norm) else None, fault is not None))
        return fault

    def _fault(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"grad_norm is {norm}"
        norms = [earlier for earlier, _ in self._steps if earlier is not None]
        if self._factor is not None and len(norms) >= _MIN_NORMS:
            median = statistics.median(norms)
            if norm > self._factor * median:
                return (
                    f"grad_norm is {norm:.4g}, more than train.spike_factor = {self._factor:g} "
                    f"times {median:.4g}, the median of the last {len(norms)} steps"
                )
        return None

    def too_many(self) -> str | None:
        """The number of bad steps as text if too many were skipped, else None."""
        bad = [was_bad for _, was_bad in self._steps]
        in_a_row = len(list(takewhile(bool, reversed(bad))))
        if in_a_row >= self._in_a_row:
            return f"{in_a_row} step{'s' * (in_a_row > 1)} in a row"
        if sum(bad) >= self._in_all:
            return f"{sum(bad)} of the last {len(bad)} steps"
        return None


def step_timeout(seconds: Sequence[float], longest: float) -> float:
    """Minutes after which a process waiting in a step considers another process lost.

    `TIMEOUT_FACTOR` times the median of the last steps' `seconds`, at least `MIN_STEP_TIMEOUT` and
    at most `longest` minutes; `longest` before `_MIN_TIMED` steps.
    """
    if len(seconds) < _MIN_TIMED:
        return longest
    return min(longest, max(MIN_STEP_TIMEOUT, TIMEOUT_FACTOR * statistics.median(seconds) / 60))


class RestartTimer:
    """Decides when a restart point is due (steps, minutes), and when a signal stops training."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._every = runtime.save_every_steps
        self._seconds = runtime.save_every_minutes * 60
        self._device = device
        self._last = time.monotonic()
        self._signalled = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """In this block SIGTERM, SIGUSR1 and SIGHUP stop training at the end of a step."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self._signalled = True

    def decide(self, step: int) -> tuple[bool, bool]:
        """Whether a restart point is due at the end of step `step`, and whether training stops.

        All processes call it and get the same answer; a signal to one of them is enough.
        """
        late = time.monotonic() - self._last >= self._seconds
        flags = torch.tensor([late, self._signalled], dtype=torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flags = flags.to(self._device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        late, stop = (bool(flag) for flag in flags.tolist())
        is_due = late or stop or step % self._every == 0
        if is_due:
            self._last = time.monotonic()
        return is_due, stop
