"""Cost of a stage, for `plan`: operations, bytes on disk, hours on named devices; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bosch.hardware import DEVICES

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Share of a device's peak that is reached in practice; recomputation counts as work.
EFFICIENCY = 0.4


@dataclass(frozen=True)
class Devices:
    """The devices of a plan: `count` GPUs called `name` with one process each, or CPU cores.

    `memory` is the bytes that a process may hold. `efficiency` is the share of the peak that the
    user gives.
    """

    name: str
    count: int
    processes: int
    memory: float
    efficiency: float | None = None

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True)
class Cost:
    """FLOPs of a stage, its peak bytes on disk, and what its work is.

    `jobs` of equal size are each done by one process. `efficiency` is the reached share of the
    devices' peak, `reads` are the bytes that decoding reads from their memory. `removed` of the
    bytes on disk are deleted when the stage ends. `memory` says what a process holds.
    """

    flops: float = 0.0
    disk: float = 1e6
    note: str = ""
    jobs: int = 1
    efficiency: float = EFFICIENCY
    removed: float = 0.0
    reads: float = 0.0
    memory: str = ""

    def hours(self, name: str, count: int) -> float:
        """Hours on `count` devices."""
        speedup = count if name == "cpu" else self.jobs / math.ceil(self.jobs / count)
        device = DEVICES[name]
        seconds = self.flops / (device.tflops * 1e12) + self.reads / (device.bandwidth * 1e9)
        return seconds / (speedup * self.efficiency) / 3600
