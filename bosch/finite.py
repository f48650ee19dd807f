"""What to do about a model whose numbers are not finite."""

from __future__ import annotations

from typing import Any

import torch

from bosch.sharding import own_part


def remedy(model: Any) -> str:
    """Half a sentence for the user: damaged weights are named, else a wider type is advised."""
    for name, weight in model.state_dict().items():
        if not bool(own_part(weight).isfinite().all()):  # without asking other processes
            return f"{name} of the model holds such numbers; make or fetch the model again"
    if model.dtype == torch.float32:
        return "they overflow even in float32"
    return "try model.dtype float32"
