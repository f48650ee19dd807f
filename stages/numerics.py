"""Device, kernels and code that the last bits of a result depend on."""

from __future__ import annotations

import torch


def numerics(
    device: torch.device,
    attention: str,
    batch_size: int,
    version: int,
    *,
    shards: int = 1,
    parts: int = 1,
) -> str:
    """Device, kernels, batches and code as one line; `version` is that of the stage.

    `shards` is the number of processes that share one model, `parts` of those that share each
    sequence.
    """
    where = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return (
        f"torch {torch.__version__}, {device.type}, {where}, {attention} attention, "
        f"batches of {batch_size}, version {version}"
        + (f", {shards} shards" if shards > 1 else "")
        + (f", {parts} parts" if parts > 1 else "")
    )
