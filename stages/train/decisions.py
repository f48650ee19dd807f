"""Decisions at the end of a training step, the same on every process.

Whether to write a restart point, and to stop.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from bosch.this_process import STOP_SIGNALS
from stages.context import Runtime


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
