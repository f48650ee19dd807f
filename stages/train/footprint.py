"""Bytes of memory in training: the formulas that `plan` prints and tests measure. No torch.

V vocabulary, C hidden size. Bytes are those of one process, unless a docstring says otherwise;
`shards` is the number of processes under FSDP or DeepSpeed, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.window import Window
from stages.context import Runtime
from stages.exchange import pass_values, split_layers
from stages.train.stage import TrainConfig

if TYPE_CHECKING:  # it loads torch
    from bosch.objective.decoder_shape import DecoderShape

# Logits computed at a time by the chunked loss: 256 MiB in float32.
_CHUNK_ELEMENTS = 2**26
_FLOAT32 = 4


@dataclass(frozen=True)
class TrainingJob:
    """A training of a model of this shape on sequences of `length` tokens.

    `layers` are the KV heads of each layer by window, by default all full.
    """

    shape: DecoderShape
    train: TrainConfig
    runtime: Runtime
    length: int
    layers: Sequence[LayerHeads] = ()

    @property
    def rows(self) -> Sequence[LayerHeads]:
        """The KV heads of each layer by window."""
        return self.layers or [{None: self.shape.key_value_heads}] * self.shape.full_layers

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the precision of the computation."""
        return 2 if self.train.mixed_precision == "bf16" else 4


def chunk_tokens(vocabulary: int, distilled: bool = False) -> int:
    """Tokens whose logits are computed at a time; half as many with a teacher's logits."""
    return max(1, _CHUNK_ELEMENTS // ((1 + distilled) * vocabulary))


def float32_bytes(numbers: int, shards: int) -> float:
    """Float32 weights, or gradients; gradients are sharded after every micro-batch."""
    return _FLOAT32 * numbers / shards


def optimizer_bytes(trained: int, shards: int) -> float:
    """AdamW's mean and variance, in float32."""
    return 2 * _FLOAT32 * trained / shards


def loss_bytes(
    tokens: int,
    hidden: int,
    vocabulary: int,
    element_bytes: int,
    trains_head: bool,
    distilled: bool = False,
    capped: bool = False,
) -> int:
    """The chunked loss: a chunk's logits and their copies, gradients of states and of the head.

    The copies are the scaled logits and the gradient of the logits. With a teacher there are the
    logits and log-probabilities of the model, the teacher's probabilities, their product, and
    gradients of two of them; and, besides the gradients of states, both models' states at the
    tokens of the loss. Capped logits have one more copy for each model. The head's gradient [V, C],
    if it is trained, is summed in float32, in addition to that of the chunk.
    """
    chunk = min(tokens, chunk_tokens(vocabulary, distilled)) * vocabulary * _FLOAT32
    states = tokens * hidden * element_bytes
    head = trains_head * vocabulary * hidden * (_FLOAT32 + element_bytes)
    return (1 + distilled) * (3 + capped) * chunk + (3 if distilled else 1) * states + head


def liger_loss_bytes(
    tokens: int, hidden: int, vocabulary: int, element_bytes: int, trains_head: bool
) -> int:
    """Liger's fused loss: a chunk's logits, gradients of states and of the head.

    The head's gradient [V, C], if it is trained, is summed in float32, in addition to that of a
    chunk, which Liger up to 0.8 converts to float32 before adding it.
    """
    chunk = -(-tokens // -(-vocabulary // hidden))
    chunk = min(tokens, 1 << (chunk - 1).bit_length())  # the next power of two
    states = tokens * hidden * element_bytes
    copy = _FLOAT32 if element_bytes < _FLOAT32 else 0
    head = trains_head * vocabulary * hidden * (_FLOAT32 + element_bytes + copy)
    return chunk * vocabulary * element_bytes + states + head


def restart_point_bytes(shape: DecoderShape, train: TrainConfig, sharding: str) -> float:
    """A restart point on disk: weights in float32, and the moments of the trained ones.

    Adapters are among the weights, and a tied table counts under both of its names. DeepSpeed's
    point has only trained weights, each once.
    """
    trained = trained_parameters(shape, train)
    weights = trained
    if sharding != "deepspeed":
        weights = shape.parameters + (trained if train.lora is not None else 0)
        weights += shape.table if shape.tied else 0
    return float32_bytes(weights, 1) + optimizer_bytes(trained, 1)


def load_host_bytes(
    parameters: int,
    saved_bytes: int,
    computed_bytes: int,
    sharding: str,
    processes: int,
    on_gpu: bool,
) -> int:
    """Host memory of a node while the model is loaded, with `processes` on the node.

    With sharding the first process reads the weights, `saved_bytes` each, and sends them one by
    one; DeepSpeed then has a copy of its shards in `computed_bytes`, the precision of training, in
    host memory. Float32 shards and DeepSpeed's second copy, which stay on the CPU, are not counted.
    Without sharding the weights go to the GPUs one by one, from files that all processes share; on
    the CPU every process keeps them in float32. A teacher is loaded before the model, and takes no
    more bytes.
    """
    if sharding == "none" and not on_gpu:
        return _FLOAT32 * parameters * processes
    if sharding == "deepspeed":
        return max(saved_bytes, computed_bytes) * parameters
    return saved_bytes * parameters


def step_traffic(job: TrainingJob) -> float:
    """Bytes that all processes together send in a step for attention over split sequences.

    Keys and values are sent, again if activations are recomputed, and their gradients come back;
    those of a teacher, whose heads are all full, are sent once. Documents change only the sinks.
    """
    shape, train, runtime = job.shape, job.train, job.runtime
    split = ContextSplit(job.length, runtime.context_parallel)
    passes = 2 if runtime.checkpointing == "none" else 3
    sent = passes * pass_values(shape, job.rows, split)
    if train.teacher != "none":
        sent += pass_values(shape, replace(job, layers=()).rows, split)
    return float(job.element_bytes * sent * (train.batch_tokens // job.length))


def exchanged_bytes(job: TrainingJob, sequences: int) -> list[tuple[float, float]]:
    """Bytes of other processes' keys and values in a process, for each of `split_layers`.

    The first number is what autograd saves in the forward pass, the second what the backward pass
    adds: the gradients of both chunks' keys from attention, spread over the sequence, and their
    sum.
    """
    split = ContextSplit(job.length, job.runtime.context_parallel)

    def head_tokens(row: LayerHeads) -> tuple[int, int]:
        """Tokens summed over the heads of a layer: in saved keys, and in added gradients."""
        saved = added = 0
        for window, heads in row.items():
            if window is None:
                saved += heads * split.length
                added += 3 * heads * split.length
            else:
                visible = max(
                    sum((c + 1) * split.chunk - split.halo_start(c, window)
                        for c in split.chunks_of(rank))
                    for rank in range(split.ranks)
                )  # fmt: skip
                saved += heads * visible
                added += heads * visible
        return saved, added

    sizes = []
    for row, head_dim in split_layers(job.shape, job.rows):
        per_token = job.element_bytes * 2 * head_dim * sequences
        saved, added = head_tokens(row)
        sizes.append((float(per_token * saved), float(per_token * added)))
    return sizes


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that one process holds in training.

    The loss, the backward pass of each layer and the sum of the tables' gradients follow each
    other, so the largest of the three counts. During the loss there are gradients only if a step
    `accumulates` several micro-batches.
    """

    parameters: float
    gradients: float
    optimizer: float
    layer_inputs: float
    gathered: float  # whole weights, copies in the precision of training, and DDP's buckets
    layer: float  # a layer's activations in its backward pass or gradients, plus whole gradients
    attention: float
    loss: float
    tables: float  # whole gradients of embedding and head
    teacher: float
    exchanged: float  # keys and values of other processes' tokens, if not in layer_inputs
    accumulates: bool
    offloaded: float = 0.0  # in host memory
    ahead: float = 0.0  # a layer's whole weights, not gathered during the loss

    @property
    def peak(self) -> float:
        """The largest sum held at once."""
        always = self.parameters + self.optimizer + self.layer_inputs + self.gathered
        always += self.teacher
        layer = self.layer + self.attention + self.exchanged
        backward = self.gradients + max(layer, self.tables)
        loss = self.loss + self.gradients * self.accumulates - self.ahead
        return always + max(backward, loss)

    @property
    def breakdown(self) -> dict[str, float]:
        """Bytes by purpose; the last five are not all in memory together."""
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
    job: TrainingJob, *, processes: int, tokens: int, accumulation: int
) -> TrainingMemory:
    """Memory of each of `processes` in steps of `accumulation` micro-batches of `tokens`."""
    shape, train, runtime, element_bytes = job.shape, job.train, job.runtime, job.element_bytes
    sharded, exchanged = runtime.sharding != "none", [(0.0, 0.0)]
    shards = processes if sharded else 1
    trained = trained_parameters(shape, train)
    tables_trained = trained == shape.parameters
    parameters = shape.parameters + (trained if train.lora is not None else 0)
    # DeepSpeed holds frozen weights only in the precision of its computation.
    in_float32 = trained if runtime.sharding == "deepspeed" else parameters
    scores, score_gradients = [0.0], 0
    if shape.keeps_scores(runtime.attention):
        scores, score_gradients = _scores(job, tokens // job.length)
        scores = [size / runtime.context_parallel for size in scores]
    if runtime.context_parallel > 1:
        exchanged = exchanged_bytes(job, tokens // job.length)
        tokens //= runtime.context_parallel
    optimizer = optimizer_bytes(trained, shards)
    gradients = float32_bytes(trained, shards)
    if runtime.sharding == "deepspeed":
        # Weights for computation, in addition to the master copy.
        optimizer += element_bytes * parameters / shards
    whole = _Whole(0.0)
    if sharded:
        whole = _whole_when_sharded(job)
        if accumulation == 1:
            gradients -= min(gradients, float32_bytes(round(whole.late_parameters), shards))
    else:
        if train.mixed_precision == "bf16":  # autocast copies what it casts
            whole = _Whole(float(element_bytes * (parameters - shape.expert_parameters)))
        if processes > 1:  # DistributedDataParallel's buckets have the size of all gradients
            whole = _Whole(whole.gathered + float32_bytes(trained, 1))
    teacher, distilled = 0.0, train.teacher != "none"
    if distilled:
        teacher = element_bytes * shape.parameters / shards
        if sharded:  # its tables stay gathered; its layers alternate with the student's
            teacher += element_bytes * shape.tables
    loss_sizes = tokens, shape.hidden, shape.vocabulary, element_bytes, tables_trained
    fused = train.liger and not distilled
    activations = _activations(job, tokens, exchanged, scores, score_gradients)
    return TrainingMemory(
        parameters=float32_bytes(in_float32, shards),
        gradients=gradients,
        optimizer=optimizer,
        layer_inputs=activations.layer_inputs,
        gathered=whole.gathered,
        layer=max(activations.layer, whole.computed_gradients) + whole.layer_gradients,
        attention=tokens * element_bytes * 2.0 * (shape.query_size + 2 * shape.key_value_size),
        loss=(
            liger_loss_bytes(*loss_sizes)
            if fused
            else loss_bytes(*loss_sizes, distilled, shape.capped)
        ),
        tables=whole.table_gradients,
        teacher=teacher,
        exchanged=activations.exchanged,
        accumulates=accumulation > 1,
        offloaded=activations.offloaded,
        ahead=element_bytes * shape.layer_parameters if runtime.sharding == "fsdp" else 0.0,
    )


class _Whole(NamedTuple):
    """Bytes of weights and gradients that are not sharded at a time; see `TrainingMemory`."""

    gathered: float
    layer_gradients: float = 0.0  # float32, of a layer and the output table
    computed_gradients: float = 0.0  # of a layer, in the precision of its computation
    table_gradients: float = 0.0
    late_parameters: float = 0.0  # those without gradients yet at the peak of a step


def _whole_when_sharded(job: TrainingJob) -> _Whole:
    """Whole weights and gradients under FSDP or DeepSpeed."""
    shape, train, element_bytes = job.shape, job.train, job.element_bytes
    trains_tables = trained_parameters(shape, train) == shape.parameters
    # The head (and a separate input table) during the whole step, and two layers, one ahead.
    whole_tables = (1 if shape.tied else 2) * shape.table
    # A layer's share with gradients: frozen weights have none.
    layer_share = trained_in_layers(shape, train) / (shape.parameters - shape.tables)
    trained_layer = layer_share * shape.layer_parameters
    return _Whole(
        gathered=element_bytes * (whole_tables + 2 * shape.layer_parameters),
        # In float32, to be summed over the processes: those of a layer stay until those of the next
        # are ready, which come after that layer's activations are freed.
        layer_gradients=_FLOAT32 * trained_layer + trains_tables * element_bytes * shape.table,
        computed_gradients=element_bytes * trained_layer,
        table_gradients=trains_tables * (element_bytes + _FLOAT32) * shape.tables,
        # Two layers and the input table, with a single micro-batch.
        late_parameters=2 * trained_layer + trains_tables * (not shape.tied) * shape.table,
    )


class _Activations(NamedTuple):
    """The activations in `TrainingMemory` of a micro-batch; `layer` without gradients."""

    layer_inputs: float
    layer: float
    exchanged: float
    offloaded: float = 0.0


def _activations(
    job: TrainingJob,
    tokens: int,
    exchanged: Sequence[tuple[float, float]],
    scores: Sequence[float],
    score_gradients: int,
) -> _Activations:
    """The bytes that autograd keeps of a micro-batch of `tokens`.

    `exchanged` is the result of `exchanged_bytes`, `scores` are the bytes of each layer's attention
    scores, if they are kept, and `score_gradients` those of their gradients in the backward pass.
    """
    shape, runtime, element_bytes = job.shape, job.runtime, job.element_bytes
    # Autocast leaves the embedding in float32, and with it all sums between layers.
    residual = element_bytes if runtime.sharding != "none" else _FLOAT32
    # Autocast casts no experts, which compute in their weights' type.
    mlp = residual if shape.experts else element_bytes
    mean_saved, most_saved = _saved_in_feed_forward(shape, mlp, job.train)
    saved = tokens * _saved_bytes_per_token(job, residual)
    # Gradients on the way through the MLP and the norms, or through attention's scores.
    backward = tokens * (mlp * 2.0 * shape.active_width + 2.0 * residual * shape.hidden)
    backward = max(backward, score_gradients)
    # Layers with states have a recurrence, as torch computes it: kernels take less.
    blocks = shape.blocks(element_bytes) if shape.kinds.states else None
    if runtime.checkpointing == "none":
        saved_keys, added = zip(*exchanged, strict=True)
        layer_inputs = shape.layers * (saved + tokens * mean_saved)
        layer_inputs += sum(saved_keys) + sum(scores)
        if blocks is not None:
            layer_inputs += shape.layers * tokens * blocks.others
            backward = max(backward, tokens * blocks.added)
        return _Activations(layer_inputs, backward, max(added))
    assert runtime.checkpointing != "auto"
    saved += tokens * most_saved
    layer_inputs, offloaded = float(shape.layers * tokens * shape.hidden * residual), 0.0
    if runtime.offload_activations:  # except those of the recomputed layer
        layer_inputs, offloaded = layer_inputs / shape.layers, layer_inputs
    if runtime.checkpointing == "attention":
        heads = shape.query_size // shape.kinds.head_dim
        widths = shape.full_layers * shape.query_size
        widths += len(shape.kinds.windows) * shape.own_query_size
        # Attention's outputs, and log-sum-exps in float32.
        layer_inputs += tokens * (element_bytes * widths + _FLOAT32 * shape.layers * heads)
    layer = saved + max(scores) + backward
    if blocks is not None:
        layer = max(layer, tokens * blocks.both_other + saved)
    return _Activations(layer_inputs, layer, max(map(sum, exchanged)), offloaded)


def _scores(job: TrainingJob, sequences: int) -> tuple[list[float], int]:
    """Bytes of attention's scores without a fused kernel.

    Those that each layer keeps, and the most of the gradients of a window's.
    """
    shape, length = job.shape, job.length
    heads = sequences * (shape.query_size // shape.kinds.head_dim)
    group = heads // shape.key_value_heads
    query_heads: list[LayerHeads] = [
        {window: group * count for window, count in row.items()} for row in job.rows
    ]
    query_heads += [{Window(size): heads} for size in shape.kinds.windows.values()]
    stored = [
        sum(shape.score_bytes(n, length, window, job.element_bytes) for window, n in row.items())
        for row in query_heads
    ]
    gradients = (
        shape.score_gradient_bytes(count, length, window)
        for row in query_heads
        for window, count in row.items()
    )
    return stored, max(gradients)


def trained_in_layers(shape: DecoderShape, train: TrainConfig) -> int:
    """Trained parameters inside the layers.

    Experts have no adapters, since their weights are not separate linear maps.
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


def unneeded_flops(shape: DecoderShape, train: TrainConfig, tokens: float) -> float:
    """Operations of `DecoderShape.training_flops` that this training over `tokens` skips.

    Frozen modules have no gradients of their weights, only of their inputs. Adapters add operations
    forward and backward.
    """
    trained = trained_in_layers(shape, train)
    if train.lora is not None:
        return 2.0 * tokens * (shape.active_parameters - 3 * trained)
    if train.freeze == "attention_only":
        return 2.0 * tokens * (shape.active_parameters - trained)
    return 0.0


def _saved_in_feed_forward(
    shape: DecoderShape, value_bytes: int, train: TrainConfig
) -> tuple[float, float]:
    """Bytes per token that autograd keeps of a layer's feed-forward blocks: mean and most.

    Liger's MLP keeps only the inputs of its activation, and experts a copy of the input, the output
    and the output times the router's weight for each expert. If the MLP is frozen, the inputs of
    its maps are not kept. Adapters freeze experts.
    """
    frozen = train.freeze == "attention_only" or (train.lora is not None and shape.experts > 0)
    if train.liger:
        experts = (1 if frozen else 3) * shape.hidden * shape.experts_per_token
        size = float(value_bytes * (3 * shape.active_width + experts))
        return size, size
    blocks = shape.blocks(value_bytes)
    return blocks.frozen if frozen else blocks.trained


def _saved_bytes_per_token(job: TrainingJob, residual: int) -> float:
    """Bytes per token that autograd keeps of a layer's attention and norms, like Qwen3's.

    Each norm keeps its input in float32, its result, and the copy of the result for the next maps;
    queries and keys are kept before and after norm and rotation, values and outputs once. Liger's
    norms keep only their inputs. If norms are frozen, tensors that only their weights' gradients
    need are not kept: a norm's result before its weight. Adapters freeze all norms, including those
    of queries and keys.
    """
    shape, train, element_bytes = job.shape, job.train, job.element_bytes
    frozen, adapted = train.freeze == "attention_only", train.lora is not None
    if train.liger:
        norms = 2 * (residual + element_bytes)
        heads = 4 * element_bytes * shape.query_size + 3 * element_bytes * shape.key_value_size
    else:
        before_weight = 0 if frozen or adapted else 2
        norms = 2 * 4 + (before_weight + (1 if frozen else 2)) * element_bytes
        if residual > element_bytes:  # results in float32 too, and a copy for each map
            norms = 2 * 4 + (3 if frozen else 5) * element_bytes + before_weight * residual
        heads = (4 + (3 if adapted else 4) * element_bytes) * shape.query_size
        heads += (4 + (2 if adapted else 3) * element_bytes) * shape.key_value_size
    all_norms = norms * max(2, shape.norms) / 2
    return float(all_norms * shape.hidden + heads)
