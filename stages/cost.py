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
# Share of a device's peak that is reached in practice, recomputation counted as work.
EFFICIENCY = 0.4


@dataclass(frozen=True)
class Devices:
    """The devices of a plan: `count` devices called `name`, GPUs with a process each, or CPU cores.

    `local_processes` load their model into one machine's memory. `efficiency` is the share of the
    peak that the user names. `memory` is what a process may hold, in bytes.
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
    """FLOPs of a stage, the most bytes it has on disk, and what else is worth saying.

    The work comes in phases, one after another, of `jobs[i]` jobs each. All jobs are of equal size,
    and each is done by one process. `efficiency` is the share of the devices' peak, `reads` are
    the bytes that decoding takes from their memory. Of the bytes on disk those that are `removed`
    are gone when the stage ends.
    """

    flops: float = 0.0
    disk: float = 1e6
    facts: list[str] = field(default_factory=list)
    jobs: tuple[int, ...] = (1,)
    efficiency: float = EFFICIENCY
    removed: float = 0.0
    reads: float = 0.0

    def speedup(self, processes: int) -> float:
        """Speed of `processes` over that of one."""
        return sum(self.jobs) / sum(math.ceil(jobs / processes) for jobs in self.jobs)

    def hours(self, name: str, count: int) -> float:
        """Hours on `count` devices."""
        faster = count if name == "cpu" else self.speedup(count)
        device = DEVICES[name]
        seconds = self.flops / (device.tflops * 1e12) + self.reads / (device.bandwidth * 1e9)
        return seconds / (faster * self.efficiency) / 3600


def memory_here(world: World) -> float | None:
    """Bytes that one process may hold: of the smallest GPU, or its share of the host's memory.

    None where the system does not say, as of a part of a GPU (MIG).
    """
    if not world.gpus:
        try:
            return host_memory() / world.processes_per_node
        except RunError:
            return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # else it lists all of the machine
        command.append(f"--id={visible}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(line) for line in output.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
