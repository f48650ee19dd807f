"""What the last bits of a log-likelihood depend on, besides the weights, the data and the mask."""

from __future__ import annotations

from typing import Any

import torch

from bosch.interface import attention_modules, head_state


def numerics(model: Any, batch_size: int, version: int) -> str:
    """Device, kernels, batches and code of a model in search mode, as one line.

    `version` is that of the code that makes the batches.
    """
    device = model.device
    where = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    state = head_state(attention_modules(model)[0])
    assert state is not None
    return (
        f"torch {torch.__version__}, {device.type}, {where}, {state.backend} attention, "
        f"batches of {batch_size}, version {version}"
    )
