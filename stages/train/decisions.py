"""What a run decides at the end of a step, the same on every process.

Whether its gradient counts: one that is not finite, or far larger than those before, is left out or
ends the run. And whether to write a restart point and to stop.
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

_REMEMBERED = 100  # steps whose gradient norms a step's own is compared with
_LEAST = 20  # of them; with fewer, only what is not finite is a bad step
MOST_IN_A_ROW = 5  # so many bad steps, one after the other, end the run
MOST_REMEMBERED = 10  # or so many among the last `_REMEMBERED`
_LEAST_TIMED = 5  # steps that are timed before their time says when one hangs
TIMES_SLOWER = 20  # than the median of the last steps: a step that takes as long hangs
LEAST_PATIENCE = 2.0  # minutes, however short the steps


class SpikeRule:
    """Judges gradient norms by those of the last steps; the same on every process."""

    def __init__(self, train: TrainConfig, steps: int) -> None:
        """`steps`: those of the whole run."""
        self._factor = train.spike_factor
        # In a short run half of its steps do: what is left out is not trained on.
        self._in_a_row, self._in_all = (
            min(most, math.ceil(steps / 2)) for most in (MOST_IN_A_ROW, MOST_REMEMBERED)
        )
        # Norm, None where it was not finite, and whether the step was bad. A spike enters the
        # median, too, so that steps after a lasting rise are no spikes.
        self._steps: deque[tuple[float | None, bool]] = deque(maxlen=_REMEMBERED)

    @property
    def state(self) -> list[Any]:
        """What a restart point keeps of the rule, as JSON."""
        return [list(step) for step in self._steps]

    def restore(self, state: Iterable[Any]) -> None:
        """Continue from the `state` of a restart point."""
        self._steps.extend((norm, bad) for norm, bad in state)

    def fault(self, norm: float) -> str | None:
        """What is wrong with a step of this gradient norm; the step is remembered."""
        fault = self._fault(norm)
        self._steps.append((norm if math.isfinite(norm) else None, fault is not None))
        return fault

    def _fault(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"grad_norm is {norm}"
        norms = [earlier for earlier, _ in self._steps if earlier is not None]
        if self._factor is not None and len(norms) >= _LEAST:
            median = statistics.median(norms)
            if norm > self._factor * median:
                return (
                    f"grad_norm is {norm:.4g}, more than train.spike_factor = {self._factor:g} "
                    f"times {median:.4g}, the median of the last {len(norms)} steps"
                )
        return None

    def too_many(self) -> str | None:
        """How many steps were bad, where these are more than may be left out."""
        bad = [was_bad for _, was_bad in self._steps]
        in_a_row = len(list(takewhile(bool, reversed(bad))))
        if in_a_row >= self._in_a_row:
            return f"{in_a_row} step{'s' * (in_a_row > 1)} in a row"
        if sum(bad) >= self._in_all:
            return f"{sum(bad)} of the last {len(bad)} steps"
        return None


def step_patience(seconds: Sequence[float], most: float) -> float:
    """Minutes that a process waits for the others in a step before it takes one for lost.

    `TIMES_SLOWER` times the median of what the last steps took, in `seconds`, but at least
    `LEAST_PATIENCE` and at most `most`, in minutes; `most` until enough steps are timed.
    """
    if len(seconds) < _LEAST_TIMED:
        return most
    return min(most, max(LEAST_PATIENCE, TIMES_SLOWER * statistics.median(seconds) / 60))


class RestartTimer:
    """Decides about restart points by steps and by minutes, and about stopping by signals."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._every = runtime.save_every_steps
        self._seconds = runtime.save_every_minutes * 60
        self._device = device
        self._last = time.monotonic()
        self._signalled = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While the block runs, SIGTERM, SIGUSR1 and SIGHUP ask for a stop at the end of a step."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self._signalled = True

    def decide(self, step: int) -> tuple[bool, bool]:
        """Whether a restart point is due at the end of step `step`, and whether training stops.

        The same on every process, which all call it; a signal to one of them is enough.
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
