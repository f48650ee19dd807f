"""Peak speed and memory of devices, from their vendors' data sheets. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak of dense bf16 matrix products in TFLOP/s, and memory in GiB."""

    tflops: float
    memory: float


# A CPU core is what AVX-512 cores reach in bf16 or float32, within a factor of 2.
DEVICES = {
    "h100": Device(989, 80),
    "h200": Device(989, 141),
    "b200": Device(2250, 180),
    "a100": Device(312, 80),
    "a800": Device(312, 80),
    "l40s": Device(362, 48),
    "rtx4090": Device(165, 24),
    "cpu": Device(0.05, 4),
}


def device_named(name: str) -> Device | None:
    """The device that a driver calls `name`, like "NVIDIA A800-SXM4-80GB"; None for others."""
    plain = name.lower().replace(" ", "")
    return next((device for key, device in DEVICES.items() if key != "cpu" and key in plain), None)
