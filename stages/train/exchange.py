"""What context parallelism sends and holds, in bytes: for `plan`, tests and the log. No torch.

`layers` are the KV heads of each layer with full attention in the original, by window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.exchange import pass_values
from stages.train.stage import TrainConfig


def step_traffic(
    shape: DecoderShape,
    layers: Sequence[LayerHeads],
    train: TrainConfig,
    runtime: Runtime,
    length: int,
) -> float:
    """Bytes that all processes together send in a step for the attention of split sequences.

    Keys and values go forth, once more where activations are recomputed, and their gradients come
    back; a teacher's heads, all full, go forth once. Documents change it by their sinks at most.
    """
    split = ContextSplit(length, runtime.context_parallel)
    passes = 2 if runtime.checkpointing == "none" else 3
    number = 2 if train.mixed_precision == "bf16" else 4
    sent = passes * pass_values(shape, layers, split)
    if train.teacher != "none":
        sent += pass_values(shape, [{None: shape.key_value_heads}] * shape.full_layers, split)
    return float(number * sent * (train.batch_tokens // length))


def exchanged_bytes(
    shape: DecoderShape,
    layers: Sequence[LayerHeads],
    split: ContextSplit,
    sequences: int,
    element_bytes: int,
) -> tuple[float, float]:
    """Bytes that a process holds of keys and values beside its own, of the layer with most of them.

    First what autograd keeps of the forward pass, then what the backward pass adds: the gradients
    of both chunks' keys as attention gives them, spread over the sequence, and their sum.
    """
    per_token = element_bytes * 2 * shape.kinds.head_dim * sequences

    def tokens(row: LayerHeads) -> Iterator[tuple[int, int]]:
        for window, count in row.items():
            if window is None:
                yield count * split.length, 3 * count * split.length
            else:
                seen = max(
                    sum((c + 1) * split.chunk - split.halo_start(c, window)
                        for c in split.chunks_of(rank))
                    for rank in range(split.ranks)
                )  # fmt: skip
                yield count * seen, count * seen

    kept, added = zip(*(map(sum, zip(*tokens(row), strict=True)) for row in layers), strict=True)
    return float(per_token * max(kept)), float(per_token * max(added))
