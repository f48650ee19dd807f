"""What the hybrid's directory costs."""

from __future__ import annotations

from stages.cost import BYTES, Cost, Devices
from stages.formats import format_bytes
from stages.materialize.memory import device_bytes
from stages.materialize.stage import MaterializeConfig
from stages.recipe import LoadedRecipe
from stages.shape import shape_of


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The weights on disk, and on the device while they are permuted."""
    shape = shape_of(loaded)
    section = loaded.recipe[MaterializeConfig]
    number = BYTES[section.dtype]
    facts = [
        f"{shape.parameters:,} parameters",
        f"{format_bytes(device_bytes(shape, number))} of weights on one device, weight by weight "
        f"from the base to the hybrid; written in files of {section.max_shard_size}",
    ]
    return Cost(0, shape.parameters * float(number), facts)
