"""Disk space of the hybrid's directory."""

from __future__ import annotations

from stages.cost import BYTES, Cost, Devices
from stages.shape import shape_of
from stages.stage import LoadedRecipe

# Up to this size base and hybrid are compared in float32, with a small tolerance.
FLOAT32_PARAMETERS = 2_000_000_000


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Bytes of the weights on disk."""
    shape = shape_of(loaded)
    size = shape.parameters * float(BYTES[loaded.recipe.model.dtype])
    return Cost(0, size, f"{shape.parameters:,} parameters")
