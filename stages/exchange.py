"""Sequences split over processes in training: values sent in a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.window import Window

if TYPE_CHECKING:  # it loads torch, which checks of recipes avoid
    from bosch.objective.decoder_shape import DecoderShape


def pass_values(shape: DecoderShape, layers: Sequence[LayerHeads], split: ContextSplit) -> int:
    """Numbers of keys and values that all processes send for a sequence in a forward pass.

    `layers` are the KV heads of each layer with full attention in the original, by window. Layers
    that slide in the original are counted too; sinks of documents after the first are not.
    """
    return sum(
        2 * width * heads * split.traffic(window)
        for row, width in split_layers(shape, layers)
        for window, heads in row.items()
    )


def split_layers(
    shape: DecoderShape, layers: Sequence[LayerHeads]
) -> Iterator[tuple[LayerHeads, int]]:
    """Heads by window of every layer whose keys are sent, and the head dimension.

    First `layers`, which have full attention in the original, then the layers that slide there.
    """
    for row in layers:
        yield row, shape.kinds.head_dim
    for size in shape.kinds.windows.values():
        yield {Window(size): shape.kinds.own_heads}, shape.kinds.own_head_dim
