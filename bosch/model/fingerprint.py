"""Identity of a loaded model, which may be sharded over processes."""

from __future__ import annotations

import hashlib
from typing import Any

from bosch.model.tensor_parallel import whole_weight

_SAMPLED_VALUES = 4096


def model_fingerprint(model: Any) -> str:
    """Identity of a loaded model: SHA-256 of names, types, shapes and a sample of every weight."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = whole_weight(weight.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu().numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()
