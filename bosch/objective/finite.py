"""Advice about a model whose numbers are not finite."""

from __future__ import annotations

from typing import Any

import torch

from bosch.model.tensor_parallel import own_shard


def remedy(model: Any) -> str:
    """Advice for the error message: mend the damaged weight, if there is one, else a wider type."""
    for name, weight in model.state_dict().items():
        if not bool(own_shard(weight).isfinite().all()):  # without asking other processes
            return f"{name} of the model holds such numbers; make or fetch the model again"
    if model.dtype == torch.float32:
        return "they overflow even in float32"
    return "try model.dtype float32"
