"""Memory that a search may use for reuse: what is free, less what one batch needs at most."""

from __future__ import annotations

from typing import Any

import torch

from bosch.errors import RunError
from bosch.hardware import free_host_memory
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.memory import ActivationSizes
from bosch.window import Windows, window_menu

# What a device's allocator loses between blocks, and what other programs of a machine may want.
_SHARE_OF_DEVICE = 0.85
_SHARE_OF_HOST = 0.5


def activation_sizes(model: Any, shards: int = 1) -> ActivationSizes:
    """Sizes of a loaded decoder; of a mixture of experts, a token's share of them."""
    return ActivationSizes.of(DecoderShape.of(model.config), model.dtype.itemsize, shards)


def reuse_room(
    model: Any, windows: Windows, rows: int, length: int, *, processes: int = 1, shards: int = 1
) -> int:
    """Bytes that this process may keep between passes of batches of `rows` x `length` tokens.

    `processes` share this machine's memory where the model is on the CPU. Call it when the model is
    loaded.
    """
    sizes = [window.size for window in window_menu(windows)]
    needed = activation_sizes(model, shards).gradient(rows, length, *sizes)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device)
        free -= torch.cuda.memory_allocated(model.device)
        return max(0, int(_SHARE_OF_DEVICE * free) - needed)
    try:
        free = free_host_memory()
    except RunError as error:
        raise RunError(f"{error}: set runtime.reuse_memory to a size") from error
    return max(0, int(_SHARE_OF_HOST * (free / processes - needed)))
