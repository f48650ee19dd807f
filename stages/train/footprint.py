"""What one process holds in training: its breakdown and its peak.

What data types and sharding decide stands in `stages.train.memory`; here is what a layer and
the tables take during a step, what split sequences send and hold, and what is in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.exchange import pass_values
from stages.train.memory import (
    distillation_bytes,
    gathered_bytes,
    gradient_bytes,
    kept_attention_bytes,
    layer_input_bytes,
    liger_loss_bytes,
    loss_bytes,
    optimizer_bytes,
    parameter_bytes,
    teacher_bytes,
)
from stages.train.stage import TrainConfig


def step_traffic(
    shape: DecoderShape,
    layers: Sequence[LayerHeads],
    train: TrainConfig,
    runtime: Runtime,
    length: int,
) -> float:
    """Bytes that all processes together send in a step for the attention of split sequences.

    Keys and values are sent, once more where activations are recomputed, and their gradients come
    back; a teacher's heads, all full, are sent once. Documents change it by their sinks at most.
    """
    split = ContextSplit(length, runtime.context_parallel)
    passes = 2 if runtime.checkpointing == "none" else 3
    sent = passes * pass_values(shape, layers, split)
    if train.teacher != "none":
        sent += pass_values(shape, [{None: shape.key_value_heads}] * shape.full_layers, split)
    return float(_element_bytes(train) * sent * (train.batch_tokens // length))


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


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that one process holds in training.

    The loss, the backward pass of each layer and the sum of the tables' gradients come one after
    the other, so the largest of the three counts. During the loss there are gradients only where
    a step `accumulates` several micro-batches.
    """

    parameters: float
    gradients: float
    optimizer: float
    layer_inputs: float
    gathered: float
    layer: float
    attention: float
    loss: float
    tables: float
    teacher: float
    exchanged: float
    accumulates: bool
    offloaded: float = 0.0  # in host memory
    ahead: float = 0.0  # of the whole weights, a layer that is not gathered during the loss

    @property
    def peak(self) -> float:
        """The most that is held at once."""
        held = self.parameters + self.optimizer + self.layer_inputs + self.gathered
        held += self.teacher
        layer = self.layer + self.attention + self.exchanged
        backward = self.gradients + max(layer, self.tables)
        return held + max(backward, self.loss + self.gradients * self.accumulates - self.ahead)

    @property
    def breakdown(self) -> dict[str, float]:
        """Bytes by what they hold; the last five are not all in memory together."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "teacher": self.teacher,
            "layer inputs": self.layer_inputs,
            "whole weights": self.gathered,
            "a layer's backward": self.layer,
            "attention workspace": self.attention,
            "exchanged keys": self.exchanged,
            "loss and logits": self.loss,
            "tables' gradients": self.tables,
        }


def training_memory(
    shape: DecoderShape,
    train: TrainConfig,
    runtime: Runtime,
    *,
    processes: int,
    tokens: int,
    accumulation: int,
    length: int = 0,
    layers: Sequence[LayerHeads] = (),
) -> TrainingMemory:
    """What each of `processes` holds in steps of `accumulation` micro-batches of `tokens`.

    Where sequences are split, they have `length` tokens and `layers` are the KV heads of each layer
    by window; without them all heads of some layer count as full.
    """
    sharded, exchanged = runtime.sharding != "none", (0.0, 0.0)
    shards = processes if sharded else 1
    trained = trained_parameters(shape, train)
    tables_trained = trained == shape.parameters
    count = shape.parameters + (trained if train.lora is not None else 0)
    number = _element_bytes(train)
    if runtime.context_parallel > 1:
        rows = layers or [{None: shape.key_value_heads}]
        split = ContextSplit(length, runtime.context_parallel)
        exchanged = exchanged_bytes(shape, rows, split, tokens // length, number)
        tokens //= runtime.context_parallel
    optimizer = optimizer_bytes(trained, shards, train.optimizer)
    gradients = gradient_bytes(trained, shards)
    if runtime.sharding == "deepspeed":
        optimizer += number * count / shards  # weights to compute with, beside the master copy
    layer_gradients = own_gradients = tables = 0.0
    if sharded:
        gathered: float = gathered_bytes(
            shape.layer_parameters, shape.hidden, shape.vocabulary, number
        )
        if not shape.tied:  # the input table is in one unit with the head
            gathered += number * shape.table
        # Of a layer, as a share: what is frozen has no gradient.
        layer_share = trained_in_layers(shape, train) / (shape.parameters - shape.tables)
        # Whole gradients in float32, to be summed over the processes: those of a layer stay until
        # those of the next are ready. Its own come when its activations are gone.
        trained_layer = layer_share * shape.layer_parameters
        layer_gradients = 4.0 * trained_layer + tables_trained * number * shape.table
        own_gradients = number * trained_layer
        if accumulation == 1:  # two layers and the input table have none yet at the peak
            late = 2 * trained_layer + tables_trained * (not shape.tied) * shape.table
            gradients -= min(gradients, gradient_bytes(round(late), shards))
        tables = tables_trained * (number + 4.0) * shape.tables
    else:
        casts = train.mixed_precision == "bf16"  # autocast copies what it casts
        gathered = number * (count - shape.expert_parameters) if casts else 0.0
        if processes > 1:  # DistributedDataParallel's buckets, as large as all gradients
            gathered += gradient_bytes(trained, 1)
    teacher, loss = 0.0, liger_loss_bytes if train.liger else loss_bytes
    if train.teacher != "none":
        loss = distillation_bytes
        teacher = teacher_bytes(shape.parameters, number, shards)
        if sharded:  # its tables stay gathered; its layers are while the student's are not
            teacher += number * shape.tables
    activations = _activations(shape, train, runtime, tokens, exchanged)
    return TrainingMemory(
        parameters=parameter_bytes(count, shards),
        gradients=gradients,
        optimizer=optimizer,
        layer_inputs=activations.layer_inputs,
        gathered=gathered,
        layer=max(activations.layer, own_gradients) + layer_gradients,
        attention=tokens * number * 2.0 * (shape.query_size + 2 * shape.key_value_size),
        loss=loss(tokens, shape.hidden, shape.vocabulary, number, tables_trained),
        tables=tables,
        teacher=teacher,
        exchanged=activations.exchanged,
        accumulates=accumulation > 1,
        offloaded=activations.offloaded,
        ahead=number * shape.layer_parameters if runtime.sharding == "fsdp" else 0.0,
    )


class _Activations(NamedTuple):
    """Fields of `TrainingMemory`; `layer` without its gradients."""

    layer_inputs: float
    layer: float
    exchanged: float
    offloaded: float = 0.0


def _activations(
    shape: DecoderShape,
    train: TrainConfig,
    runtime: Runtime,
    tokens: int,
    exchanged: tuple[float, float],
) -> _Activations:
    """What autograd keeps of a micro-batch of `tokens`; `exchanged` is of `exchanged_bytes`."""
    number = _element_bytes(train)
    # Autocast leaves the embedding in float32, and with it all sums between layers.
    residual = number if runtime.sharding != "none" else 4
    # Autocast casts no experts, which compute in their weights' own type.
    mlp = residual if shape.experts else number
    saved = tokens * _saved_by_a_layer(shape, number, residual, mlp, train)
    # Gradients on the way through the MLP and the norms.
    backward = tokens * (mlp * 2.0 * shape.active_width + 2.0 * residual * shape.hidden)
    if runtime.checkpointing == "none":
        return _Activations(shape.layers * (saved + exchanged[0]), backward, exchanged[1])
    assert runtime.checkpointing != "auto"
    layer_inputs: float = layer_input_bytes(shape.layers, tokens, shape.hidden, residual)
    offloaded = 0.0
    if runtime.offload_activations:  # of all but the layer that is recomputed
        layer_inputs, offloaded = layer_inputs / shape.layers, layer_inputs
    if runtime.checkpointing == "attention":
        heads = shape.query_size // shape.kinds.head_dim
        widths = shape.full_layers * shape.query_size
        widths += len(shape.kinds.windows) * shape.own_query_size
        layer_inputs += kept_attention_bytes(shape.layers * heads, widths, tokens, number)
    return _Activations(layer_inputs, saved + backward, sum(exchanged), offloaded)


def _element_bytes(train: TrainConfig) -> int:
    """Bytes of a number in the precision that training computes in."""
    return 2 if train.mixed_precision == "bf16" else 4


def trained_in_layers(shape: DecoderShape, train: TrainConfig) -> int:
    """Trained parameters inside the layers.

    Experts take no adapters: their weights are no linear maps of their own.
    """
    attention_only = train.freeze == "attention_only"
    if train.lora is not None:
        sides = shape.attention_sides if attention_only else shape.linear_sides
        return train.lora.rank * sides
    return shape.attention_parameters if attention_only else shape.parameters - shape.tables


def trained_parameters(shape: DecoderShape, train: TrainConfig) -> int:
    """Parameters that have gradients and moments."""
    whole = train.lora is None and train.freeze == "none"
    return shape.parameters if whole else trained_in_layers(shape, train)


def _saved_by_a_layer(
    shape: DecoderShape, number: int, residual: int, mlp: int, train: TrainConfig
) -> float:
    """Bytes per token that autograd keeps of one decoder layer, as for Qwen3.

    Each norm keeps its input in float32, besides its result as it is and as the next maps take it;
    queries and keys are kept before and after norm and rotation, values and outputs once; the MLP
    keeps gate, up, their activation and product. Liger's norms and MLP keep their inputs only.
    Where norms and MLP are frozen, what only their weights' gradients take is not kept: a norm's
    result before its weight, and the inputs of the MLP's maps. Experts are, under adapters, too.
    """
    frozen = train.freeze == "attention_only"
    frozen_mlp = frozen or (train.lora is not None and shape.experts > 0)
    if train.liger:
        norms = 2 * (residual + number)
        heads = 4 * number * shape.query_size + 3 * number * shape.key_value_size
        width = 3 * mlp
    else:
        norms = 2 * 4 + (1 if frozen else 4) * number
        if residual > number:  # the results in float32 too, and a copy for each map
            norms = 2 * 4 + (3 if frozen else 5) * number + (0 if frozen else 2) * residual
        heads = (4 + 4 * number) * shape.query_size + (4 + 3 * number) * shape.key_value_size
        width = (3 if frozen_mlp else 4) * mlp
    # Copies for each expert: what goes in, what comes out, and by its router's weight.
    dispatched = (1 if frozen_mlp else 3) * mlp * shape.hidden * shape.experts_per_token
    return float(norms * shape.hidden + heads + width * shape.active_width + dispatched)
