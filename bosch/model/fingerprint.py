"""Identity of a loaded model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

_SAMPLED_VALUES = 4096
# Fields about the origin and name of a model, on which outputs do not depend.
_IGNORED = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def model_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a loaded model: configuration (RoPE, caps), every weight's name and a sample."""
    digest = hashlib.sha256()
    content = _relevant(model.config.to_dict())
    digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu().numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


def _relevant(content: Any) -> Any:
    """The fields of a configuration, nested ones included, on which outputs depend."""
    if not isinstance(content, dict):
        return content
    return {name: _relevant(value) for name, value in content.items() if name not in _IGNORED}
