"""Disk space of the hybrid's directory."""

from __future__ import annotations

from stages.cost import BYTES, Cost, Devices
from stages.materialize.stage import MaterializeConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe

# Up to this size base and hybrid are compared in float32, with a small tolerance.
FLOAT32_PARAMETERS = 2_000_000_000


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Bytes of the weights on disk."""
    shape = shape_of(loaded)
    section = loaded.recipe[MaterializeConfig]
    itemsize = BYTES[section.dtype]
    return Cost(0, shape.parameters * float(itemsize), f"{shape.parameters:,} parameters")
