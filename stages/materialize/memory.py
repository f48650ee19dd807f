"""What materialising holds, in bytes: the formula that `plan` prints. No torch."""

from __future__ import annotations

from bosch.objective.decoder_shape import DecoderShape

# Models up to this size are compared in float32, where the comparison is sharp.
FLOAT32_PARAMETERS = 2_000_000_000


def device_bytes(shape: DecoderShape, number: int) -> int:
    """Weights in memory at most, in `number` bytes each: one model, and the weight that is moved.

    Base and hybrid are never whole at the same time. A small model is computed in float32.
    """
    computed = 4 if shape.parameters <= FLOAT32_PARAMETERS else number
    return max(computed * shape.parameters, number * (shape.parameters + shape.largest_weight))
