"""Cost of a measurement."""

from __future__ import annotations

from bosch.budget import window_shares
from bosch.model.cache_size import CacheSize
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.formats import counted
from stages.measure.stage import MeasureConfig, MeasureSettings
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Prefill and decoding of both models on one device, each after a warm-up of two chunks."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    section, bytes_per_value = recipe[MeasureConfig], BYTES[recipe.model.dtype]
    rows = recipe[SearchConfig].kv_heads(shape.kinds, recipe.model.dtype)
    cache = CacheSize.of(rows, shape.kinds, bytes_per_value, state_bytes=0)
    flops, reads, runs = 0.0, 0.0, section.repeats * section.batch_size
    for shares, cached in ((None, cache.original), (window_shares(rows), cache.dynamic)):
        for length in section.lengths:
            decoded = section.decode_tokens
            weights = bytes_per_value * shape.active_parameters
            reads += section.repeats * decoded * (weights + section.batch_size * cached(length))
            flops += shape.forward_flops(runs * (length + decoded), length, shares, runs * decoded)
            warm_up = min(length, 2 * MeasureSettings().chunk)
            flops += shape.forward_flops(runs * (warm_up + 1), warm_up, shares, runs)
    note = f"{counted(section.repeats, 'run')} at each length on one device"
    return Cost(flops, note=note, efficiency=devices.efficiency or EFFICIENCY, reads=reads)
