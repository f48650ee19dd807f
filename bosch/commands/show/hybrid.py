"""What a hybrid's configuration says of its heads and of its KV cache."""

from __future__ import annotations

from typing import Any

from bosch.errors import UserError
from bosch.model.cache_size import CacheSize
from bosch.model.configuration import is_hybrid
from bosch.model.deploy_mode import deploy_layouts
from bosch.model.families import decoder_layers, text_config
from bosch.model.loading import load_config

_LENGTHS = (1024, 8 * 1024, 32 * 1024, 128 * 1024)


def hybrid_record(model: str) -> dict[str, Any]:
    """Heads, window and bytes; raises UserError for a model that is no hybrid."""
    config = load_config(model)
    if not is_hybrid(config):
        raise UserError(f"{model}: is no hybrid model; expected one that bosch has made")
    kinds, layouts = decoder_layers(config), deploy_layouts(config)
    rows = {layer: layout for layer in kinds.full if (layout := layouts[layer]) is not None}
    full = {layer: len(layout.full) for layer, layout in rows.items()}
    window = next(iter(rows.values())).window
    itemsize = 4 if "32" in str(text_config(config).dtype) else 2
    size = CacheSize.of(list(full.values()), kinds, window, itemsize)
    return {
        "model": model,
        "model_type": config.model_type,
        "window_size": window.size,
        "sinks": window.sinks,
        "key_value_heads_per_layer": kinds.heads,
        "full_kv_heads_per_layer": {str(layer): count for layer, count in full.items()},
        "cache_bytes": [
            {"tokens": n, "hybrid": size.dynamic(n), "original": size.original(n)} for n in _LENGTHS
        ],
    }
