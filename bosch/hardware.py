"""Speed and memory of devices; memory and cores of this machine, or of the container around it.

Speeds and memories of devices come from data sheets. Free of heavy imports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bosch.errors import RunError

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Device:
    """Peak of dense bf16 matrix products in TFLOP/s, memory in GiB, and bandwidth in GB/s.

    For a CPU they are those of one core. The bandwidth is 0 if no plan needs it.
    """

    tflops: float
    memory: float
    bandwidth: float = 0.0


# The CPU core: training SmolLM2-135M reaches 0.4 of it in float32 by AVX2; in bf16 cores differ
# tenfold.
DEVICES = {
    "h100": Device(989, 80, 3350),
    "h200": Device(989, 141, 4800),
    "b200": Device(2250, 180, 8000),
    "a100": Device(312, 80, 2039),
    "a800": Device(312, 80, 2039),
    "l40s": Device(362, 48, 864),
    "rtx4090": Device(165, 24, 1008),
    "cpu": Device(0.12, 4, 5),
}

# Drivers' names of devices that contain a name above but have another peak.
_VARIANTS: dict[str, Device | None] = {
    "mig": None,  # a part of a GPU
    "a1000": None,
    "h100pcie": Device(756, 80),
    "h100nvl": Device(835, 94),
    "h200nvl": Device(835, 141),
    "gb200": Device(2500, 186),
    "rtx4090d": None,
    "rtx4090laptop": None,
}


def device_named(name: str) -> Device | None:
    """The device with a driver's `name`, like "NVIDIA A800-SXM4-80GB"; None if it is unknown."""
    plain = name.lower().replace(" ", "")
    for key, variant in _VARIANTS.items():
        if key in plain:
            return variant
    return next((device for key, device in DEVICES.items() if key != "cpu" and key in plain), None)


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory of this machine or its container, in bytes; raises RunError if it is unknown."""
    return min([_total_memory(proc), *_memory_limits(proc, cgroups)])


def cpu_cores(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for folder in _control_groups("cpu", proc, cgroups):
        period: int | None
        quota, _, rest = _text(folder / "cpu.max").partition(" ")  # version 2
        period = _number(rest)
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _number(_text(folder / "cpu.cfs_period_us"))
        time = _number(quota)  # "max" and -1 mean no limit
        if time is not None and time > 0 and period:
            cores = min(cores, math.ceil(time / period))
    return cores


def _total_memory(proc: Path) -> int:
    """MemTotal of /proc/meminfo, in bytes."""
    fields = dict(line.partition(":")[::2] for line in _text(proc / "meminfo").splitlines())
    value = _number(fields.get("MemTotal", "").removesuffix("kB"))
    if value is None:
        raise RunError(f"{proc / 'meminfo'} does not say the MemTotal of this machine")
    return value * 1024


def _memory_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Limit (bytes) of each limited control group."""
    for folder in _control_groups("memory", proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            limit = _number(_text(folder / name))
            if limit is not None:
                yield limit


def _control_groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of this process's control groups and of those around them, innermost first.

    Some may not exist: a container may name its group by a path of the host.
    """
    for line in _text(proc / "self" / "cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        roots = [cgroups, cgroups / "unified"]
        if controllers:
            roots = [cgroups / controllers, cgroups / controller]
        for root in dict.fromkeys(roots):
            for depth in range(len(names), -1, -1):
                yield root.joinpath(*names[:depth])


def _text(path: Path) -> str:
    """Content of a system file; empty if it does not exist."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
