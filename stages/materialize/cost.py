"""Disk space of the hybrid's directory, and device memory to make it."""

from __future__ import annotations

from bosch.objective.decoder_shape import DecoderShape
from stages.cost import BYTES, Cost, Devices
from stages.formats import format_bytes
from stages.materialize.stage import MaterializeConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe

# Up to this size base and hybrid are compared in float32, with a small tolerance.
FLOAT32_PARAMETERS = 2_000_000_000


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Bytes of the weights on disk, and on the device during permutation and comparison."""
    shape = shape_of(loaded)
    section = loaded.recipe[MaterializeConfig]
    itemsize = BYTES[section.dtype]
    facts = [
        f"{shape.parameters:,} parameters",
        f"{format_bytes(device_bytes(shape, itemsize))} of weights on one device, moved one by one "
        f"from the base to the hybrid; files of up to {section.max_shard_size}",
    ]
    return Cost(0, shape.parameters * float(itemsize), facts)


def device_bytes(shape: DecoderShape, itemsize: int) -> int:
    """Peak bytes on the device, `itemsize` per weight: one model and one more tensor.

    Tensors move one at a time, so base and hybrid are never complete at the same time. The
    comparison loads one model at a time, a small one in float32.
    """
    check_bytes = shape.parameters * (4 if shape.parameters <= FLOAT32_PARAMETERS else itemsize)
    return max(check_bytes, itemsize * (shape.parameters + shape.largest_weight))
