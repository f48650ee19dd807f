"""A hybrid's heads and the bytes of its KV cache, from its configuration."""

from __future__ import annotations

from typing import Any

from bosch.errors import UserError
from bosch.model.cache_size import CacheSize
from bosch.model.configuration import hybrid_mask, is_hybrid
from bosch.model.families import decoder_layers, text_config
from bosch.model.loading import load_config

_LENGTHS = (1024, 8 * 1024, 32 * 1024, 128 * 1024)


def hybrid_record(model: str) -> dict[str, Any]:
    """Heads, windows and bytes; raises UserError for a model that is no hybrid."""
    config = load_config(model)
    if not is_hybrid(config):
        raise UserError(f"{model} is no hybrid model; expected a model that bosch has written")
    kinds, mask = decoder_layers(config), hybrid_mask(config)
    # The dtype of the whole model, as in transformers; that of its text decoder may be outdated.
    # Models with 8-bit weights cache 16 bits; an unknown dtype counts as 16 bits.
    itemsize = max(getattr(config.dtype or text_config(config).dtype, "itemsize", 2), 2)
    # The bytes of states are known only after a forward pass.
    size = CacheSize.of(mask.layers, kinds, itemsize, state_bytes=0)
    return {
        "model": model,
        "model_type": config.model_type,
        "layers": list(kinds.full),
        **mask.content,
        "cache_bytes": [
            {"tokens": n, "hybrid": size.dynamic(n), "original": size.original(n)} for n in _LENGTHS
        ],
        "layers_with_states": len(kinds.states),
    }
