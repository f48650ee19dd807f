"""What the last bits of a result depend on, besides the weights and the data."""

from __future__ import annotations

import torch


def numerics(device: torch.device, attention: str, batch_size: int, version: int) -> str:
    """Device, kernels, batches and code as one line; `version` is that of the stage."""
    where = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return (
        f"torch {torch.__version__}, {device.type}, {where}, {attention} attention, "
        f"batches of {batch_size}, version {version}"
    )
