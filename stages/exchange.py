"""Sequences split over processes: what a pass sends, and when they cannot be split. No torch.

`layers` are the KV heads of each layer with full attention in the original, by window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.model.families import split_fault
from bosch.window import Window
from stages.recipe import LoadedRecipe

if TYPE_CHECKING:  # it loads torch, and the checks of recipes do not
    from bosch.objective.decoder_shape import DecoderShape


def pass_values(shape: DecoderShape, layers: Sequence[LayerHeads], split: ContextSplit) -> int:
    """Numbers of keys and values that all processes together send for a sequence in a forward pass.

    Times the bytes of one number these are bytes. Layers with windows of their own are counted too,
    the sinks of further documents in a sequence are not.
    """
    own = [{Window(size): shape.kinds.own_heads} for size in shape.kinds.windows.values()]
    widths = ((layers, shape.kinds.head_dim), (own, shape.kinds.own_head_dim))
    return sum(
        2 * width * count * split.traffic(window)
        for some, width in widths
        for row in some
        for window, count in row.items()
    )


def whole_chunks(length: int, ranks: int) -> ContextSplit:
    """The split of a sequence that is padded at its end to whole chunks."""
    return ContextSplit(length + -length % (2 * ranks), ranks)


def split_faults(loaded: LoadedRecipe, field: str) -> Iterator[str]:
    """Why `{field}: context` is impossible here; of the model only where it is known."""
    if loaded.world.size == 1:
        yield f"{field}: context needs several processes, there is one (runtime.processes)"
    fault = split_fault(loaded.info.loaded) if loaded.info is not None else None
    if fault is not None:
        yield f"{field}: the model's sequences cannot be split: {fault}; set data"
