"""Heartbeats of a stage's processes, by which the others notice a process that has stopped.

A collective's timeout bounds only the steps that all processes do together. While one of them
loads, saves or makes samples, the others wait for as long as such work may take.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from bosch.errors import StoppedError
from bosch.this_process import name_processes, world_size

_CHECKS = 10  # least number of checks without a heartbeat before a process counts as lost
_LONGEST_SECONDS = 30.0  # the longest time between two checks
ENDED = 1 << 40  # a process that has finished adds this to its count
_END_SECONDS = 5.0  # the longest that a finished process waits for the store


@contextlib.contextmanager
def heartbeats(minutes: float, on_lost: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, send heartbeats and watch those of the stage's other processes.

    `on_lost` is called with an error message, on a thread, when a process has sent none for
    `minutes`. Needs torchrun's variables, and does nothing for a single process.
    """
    if world_size() == 1:
        yield
        return
    heartbeat = Heartbeat(minutes, on_lost)
    try:
        yield
    except StoppedError:
        heartbeat.end()
        raise
    # Not after a failure: the process ends soon, and the others then miss its heartbeats.
    heartbeat.end()


class Heartbeat:
    """Increments a count in the launcher's store, and watches the counts of other processes.

    Silence is measured in checks, not seconds, so that a suspended job can continue. Threads do
    the work, so a process whose main thread is busy counts as alive.
    """

    def __init__(self, minutes: float, on_lost: Callable[[str], None]) -> None:
        self._rank, size = int(os.environ["RANK"]), world_size()
        self._minutes, self._on_lost = minutes, on_lost
        self._interval = min(minutes * 60 / _CHECKS, _LONGEST_SECONDS)
        self._keys = [f"bosch/heartbeat/{rank}" for rank in range(size)]
        self._counts = [0] * size
        self._exchanges = 0
        self._ending = threading.Event()
        # Two threads, since a store whose machine is frozen never answers.
        self._exchange = threading.Thread(target=self._exchange_counts, daemon=True)
        self._exchange.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Tell the others that this process has finished."""
        self._ending.set()
        self._exchange.join(_END_SECONDS)

    def _exchange_counts(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; `_watch` notices
            store = _launcher_store()
            for key in self._keys:
                store.add(key, 0)  # reading a missing key would block
            while not self._ending.is_set():
                store.add(self._keys[self._rank], 1)
                self._counts = [int(count) for count in store.multi_get(self._keys)]
                self._exchanges += 1
                self._ending.wait(self._interval)
            store.add(self._keys[self._rank], ENDED)

    def _watch(self) -> None:
        previous, silent_checks = [-1], [0]
        while not self._ending.wait(self._interval):
            current = [*self._counts, self._exchanges]
            if len(previous) != len(current):
                previous, silent_checks = current, [0] * len(current)
                continue
            silent_checks = [
                checks + 1 if new == old < ENDED else 0
                for checks, old, new in zip(silent_checks, previous, current, strict=True)
            ]
            previous = current
            if max(silent_checks) * self._interval < self._minutes * 60:
                continue
            silent = "the first node of this run, or its launcher,"
            if silent_checks[-1] == 0:
                # A healthy process may look silent for a check or two.
                least = max(silent_checks) / 2
                ranks = [rank for rank, checks in enumerate(silent_checks[:-1]) if checks > least]
                silent = f"{name_processes(ranks)} of this run"
            elif max(self._counts) >= ENDED:
                return  # the store ends with the first node, which has finished
            self._on_lost(
                f"{silent} has sent no heartbeat for {self._minutes:g} minutes "
                "(runtime.collective_timeout_minutes)"
            )
            return


def _launcher_store() -> Any:
    """A new connection, since a shared one blocks while another thread waits on it."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
    )
