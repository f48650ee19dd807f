"""Cost of a stage, for `plan`: operations, bytes on disk, hours on named devices; no torch."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass, field

from bosch.errors import RunError
from bosch.hardware import DEVICES, host_memory
from stages.stage import World

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Share of a device's peak that is reached in practice; recomputation counts as work.
EFFICIENCY = 0.4


@dataclass(frozen=True)
class Devices:
    """The devices of a plan: `count` GPUs called `name` with one process each, or CPU cores.

    `local_processes` is the number of processes on one machine. `efficiency` is the share of the
    peak that the user gives. `memory` is the bytes that a process may hold.
    """

    name: str
    count: int
    processes: int
    local_processes: int
    memory: float
    efficiency: float | None = None

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True)
class Cost:
    """FLOPs of a stage, its peak bytes on disk, and remarks.

    The work consists of successive phases; phase i has `jobs[i]` jobs of equal size, each done by
    one process. `efficiency` is the reached share of the devices' peak, `reads` are the bytes that
    decoding reads from their memory. `removed` of the bytes on disk are deleted when the stage
    ends.
    """

    flops: float = 0.0
    disk: float = 1e6
    facts: list[str] = field(default_factory=list)
    jobs: tuple[int, ...] = (1,)
    efficiency: float = EFFICIENCY
    removed: float = 0.0
    reads: float = 0.0

    def speedup(self, processes: int) -> float:
        """Speedup of `processes` processes over one."""
        return sum(self.jobs) / sum(math.ceil(jobs / processes) for jobs in self.jobs)

    def hours(self, name: str, count: int) -> float:
        """Hours on `count` devices."""
        speedup = count if name == "cpu" else self.speedup(count)
        device = DEVICES[name]
        seconds = self.flops / (device.tflops * 1e12) + self.reads / (device.bandwidth * 1e9)
        return seconds / (speedup * self.efficiency) / 3600


def memory_here(world: World) -> float | None:
    """Bytes that one process may hold: the smallest GPU's, or its share of the host's memory.

    None if unknown, for example for a part of a GPU (MIG).
    """
    if not world.gpus:
        try:
            return host_memory() / world.processes_per_node
        except RunError:
            return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # else nvidia-smi lists all GPUs
        command.append(f"--id={visible}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(line) for line in output.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
