"""When training writes a restart point, and when it stops: the same answer on every process."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stages.context import Runtime

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Decision:
    """What all processes do at the end of a step."""

    restart_point: bool
    stop: bool


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
        """While the block runs, SIGTERM and SIGUSR1 ask for a stop at the end of a step."""
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

    def decide(self, step: int) -> Decision:
        """Called on every process at the end of step `step`; a signal to one of them is enough."""
        late = time.monotonic() - self._last >= self._seconds
        flags = torch.tensor([late, self._signalled], dtype=torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flags = flags.to(self._device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        late, stop = (bool(flag) for flag in flags.tolist())
        decision = Decision(late or stop or step % self._every == 0, stop)
        if decision.restart_point:
            self._last = time.monotonic()
        return decision
