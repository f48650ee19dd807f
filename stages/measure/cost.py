"""What a measurement costs."""

from __future__ import annotations

from bosch.budget import window_shares
from bosch.model.cache_size import CacheSize, beside_states
from stages.cost import BYTES, Cost, Devices
from stages.formats import format_bytes
from stages.measure.stage import MeasureConfig
from stages.recipe import LoadedRecipe
from stages.search.stage import SearchConfig
from stages.shape import shape_of


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Prefill and decoding of both models, on one device, the first pass of each to warm up."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    section, number = recipe[MeasureConfig], BYTES[recipe.model.dtype]
    rows = recipe[SearchConfig].kv_heads(shape.kinds, recipe.model.dtype)
    cache = CacheSize.of(rows, shape.kinds, number, state_bytes=0)
    longest = max(section.lengths)
    flops = 0.0
    for shares in (None, window_shares(rows)):
        for length in section.lengths:
            tokens = section.batch_size * (2 * length + section.decode_tokens)
            flops += section.repeats * shape.forward_flops(tokens, length, shares)
    facts = [
        f"{section.repeats} runs of original and hybrid at each of "
        f"{', '.join(f'{length:,}' for length in section.lengths)} tokens, one device",
        f"{format_bytes(number * shape.parameters)} of weights, "
        f"{format_bytes(section.batch_size * cache.original(longest))} of KV cache"
        f"{beside_states(len(shape.kinds.states))}",
    ]
    return Cost(flops, 1e6, facts)
