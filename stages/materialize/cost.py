"""What the hybrid's directory costs, and the memory that making it takes."""

from __future__ import annotations

from bosch.objective.decoder_shape import DecoderShape
from stages.cost import BYTES, Cost, Devices
from stages.formats import format_bytes
from stages.materialize.stage import MaterializeConfig
from stages.recipe import LoadedRecipe
from stages.shape import shape_of

# Models up to this size are compared in float32, where the comparison is sharp.
FLOAT32_PARAMETERS = 2_000_000_000


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


def device_bytes(shape: DecoderShape, number: int) -> int:
    """Weights in memory at most, in `number` bytes each: one model, and the weight that is moved.

    Base and hybrid are never whole at the same time. A small model is computed in float32.
    """
    computed = 4 if shape.parameters <= FLOAT32_PARAMETERS else number
    return max(computed * shape.parameters, number * (shape.parameters + shape.largest_weight))
