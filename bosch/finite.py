"""What to do about a model whose numbers are not finite."""

from __future__ import annotations

from typing import Any

import torch


def remedy(model: Any) -> str:
    """Half a sentence for the user: damaged weights are named, else a wider type is advised."""
    for name, weight in model.state_dict().items():
        # Of a sharded weight the own part, without asking other processes.
        mine = weight.to_local() if hasattr(weight, "to_local") else weight
        if not bool(mine.isfinite().all()):
            return f"{name} of the model holds such numbers; make or fetch the model again"
    if model.dtype == torch.float32:
        return "they overflow even in float32"
    return "try model.dtype float32"
