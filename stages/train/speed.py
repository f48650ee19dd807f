"""How fast training goes: tokens per second, share of the device's peak, memory, and pauses."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bosch.hardware import device_named
from bosch.model.loading import full_attention_config
from bosch.model.stored_config import StoredConfig
from bosch.window import Window
from stages.train.schedule import Schedule


def step_flops(config: Any, schedule: Schedule, distilled: bool = False) -> float:
    """Operations of a step on a hybrid of `config`, forward and backward, nothing recomputed.

    If it is `distilled`, the original's forward pass is part of it. A packed sequence counts as one
    document; under document masking there are fewer operations.
    """
    sizes = StoredConfig.of_loaded(full_attention_config(config))
    hybrid = config.hybrid_attention
    full = sum(hybrid["full_kv_heads_per_layer"])
    swa_ratio = 1 - full / (len(sizes.kinds.full) * sizes.key_value_heads)
    tokens, length = schedule.batch_tokens, schedule.sequence_length
    window = Window(hybrid["window_size"], hybrid["sinks"])
    flops = sizes.decoder.training_flops(tokens, length, swa_ratio, window)
    return flops + distilled * sizes.decoder.forward_flops(tokens, length)


def peak_flops(processes: int) -> float | None:
    """Operations per second of all GPUs by the vendor's data sheet; None where it is not known."""
    if not torch.cuda.is_available():
        return None
    device = device_named(torch.cuda.get_device_name())
    return None if device is None else device.tflops * 1e12 * processes


def peak_memory() -> int:
    """Most bytes this process has held so far: of its GPU, without one of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """Seconds since the last reading, and those of them that went elsewhere, by name."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._elsewhere: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._elsewhere[name] += time.monotonic() - started

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last reading, and by name; counting starts again."""
        now = time.monotonic()
        seconds, elsewhere = now - self._started, dict(self._elsewhere)
        self._started = now
        self._elsewhere.clear()
        return seconds, elsewhere
