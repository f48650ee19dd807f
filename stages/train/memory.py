"""Bytes that a process holds in a training step, by formula; no torch.

A CI test holds it to a run on fake tensors, within 15 percent. V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bosch.budget import LayerHeads
from stages.context import Runtime
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig

if TYPE_CHECKING:  # it loads torch
    from bosch.score.decoder_shape import DecoderShape

# Logits computed at a time by the chunked loss: 256 MiB in float32.
_CHUNK_ELEMENTS = 2**26
_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32  # AdamW's mean and variance of a weight
# `runtime.checkpointing: auto` keeps all activations below this share of the device.
_EASILY = 0.6


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process.

    In the backward pass gradients grow while activations and, without sharding, copies of weights
    are freed. Sharded gradients and those of earlier micro-batches count from its start.
    """

    checkpointing: str
    weights: float  # and moments
    gradients: float
    gathered: float  # whole weights, copies in the precision of training, buckets, the teacher
    activations: float  # that the forward pass keeps
    layer: float  # a layer's activations, and gradients of its activations and weights
    loss: float  # a chunk of logits, gradients of the states and of the output head
    tables: float  # the tables' gradients before they are summed
    sharded: bool
    accumulates: bool  # several micro-batches

    @property
    def peak(self) -> float:
        """The most that is held at once."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by purpose at the peak: at the start of the backward pass, or at its end."""
        early = self.gradients if self.sharded or self.accumulates else 0.0
        start = early, self.gathered, self.activations, max(self.loss, self.layer)
        late = self.gathered if self.sharded else 0.0
        end = self.gradients, late, 0.0, max(self.tables, self.layer * self.sharded)
        gradients, gathered, activations, work = max(start, end, key=sum)
        return {
            "weights, gradients and moments": self.weights + gradients,
            "gathered weights": gathered,
            "activations": activations,
            "a layer's backward pass or the loss": work,
        }


@dataclass(frozen=True)
class TrainingJob:
    """A training of a model of this shape on sequences of `length` tokens.

    `rows` are the KV heads of each layer by window. `capacity` are the bytes of a device, on which
    `runtime.checkpointing: auto` depends.
    """

    shape: DecoderShape
    train: TrainConfig
    runtime: Runtime
    length: int
    rows: Sequence[LayerHeads]
    processes: int
    on_gpu: bool
    capacity: float

    def memory(self) -> TrainingMemory:
        """The bytes of a process; `auto` is `full` unless keeping all activations easily fits.

        Raises UserError where the batch cannot be divided among the processes.
        """
        if self.runtime.checkpointing != "auto":
            return self._memory(self.runtime.checkpointing)
        kept = None if self.runtime.offload_activations else self._memory("none")
        if kept is not None and kept.peak <= _EASILY * self.capacity:
            return kept
        return self._memory("full")

    @property
    def _element(self) -> int:
        """Bytes of a number in the precision of the computation."""
        return 2 if self.train.mixed_precision == "bf16" else 4

    @property
    def _residual(self) -> int:
        """Bytes of a hidden state: autocast leaves the embedding and so all sums in float32."""
        return self._element if self.runtime.sharding != "none" else _FLOAT32

    def _memory(self, checkpointing: str) -> TrainingMemory:
        shape, train, element = self.shape, self.train, self._element
        schedule = make_schedule(train, self.runtime, self.length, self.processes, self.on_gpu)
        tokens = schedule.micro_batch_size * self.length // self.runtime.context_parallel
        sharding = self.runtime.sharding
        shards = max(1, self.processes // self.runtime.replicas) if sharding != "none" else 1
        parameters = shape.parameters
        weights = (_FLOAT32 + _MOMENTS) * parameters / shards
        if sharding == "deepspeed":  # beside weights for computation
            weights += element * parameters / shards
        gathered, reduced, tables = self._gathered()
        if train.teacher != "none":
            gathered += element * shape.parameters / shards + (shards > 1) * element * shape.tables
        kept, layer = self._activations(checkpointing, schedule.micro_batch_size, tokens)
        return TrainingMemory(
            checkpointing,
            weights,
            _FLOAT32 * parameters / shards,
            gathered,
            kept,
            layer + reduced,
            self._loss(tokens),
            tables,
            shards > 1,
            schedule.accumulation > 1,
        )

    def _gathered(self) -> tuple[float, float, float]:
        """Bytes of whole weights, and of whole gradients of a layer and of the tables."""
        shape, element = self.shape, self._element
        if self.runtime.sharding == "none":
            copies = element * shape.parameters if element < _FLOAT32 else 0  # by autocast
            buckets = _FLOAT32 * shape.parameters * (self.processes > 1)
            # A tied table has two gradients and their sum.
            summed = (2 if shape.tied else 1) * _FLOAT32 * shape.table
            return copies + buckets, 0.0, float(summed)
        # The tables during the whole step, and two layers, one ahead. Gradients are summed in
        # float32, a layer's while the next one is computed.
        tables = (1 if shape.tied else 2) * shape.table
        return (
            float(element * (tables + 2 * shape.layer_parameters)),
            float(_FLOAT32 * shape.layer_parameters + element * shape.table),
            float((element + _FLOAT32) * shape.tables),
        )

    def _activations(self, checkpointing: str, rows: int, tokens: int) -> tuple[float, float]:
        """Bytes that the forward pass keeps, and bytes of one layer's backward pass."""
        shape, element, residual = self.shape, self._element, self._residual
        query, key_value = shape.query_size, shape.key_value_size
        layer = tokens * self._saved_per_token + self._scores(rows)
        # Gradients in the feed-forward block and the sums, or in attention.
        width = 2 * element * shape.active_width + 2 * residual * shape.hidden
        added = tokens * max(width, 2 * element * (query + 2 * key_value))
        if self.runtime.context_parallel > 1:  # keys, values and gradients of full heads
            full = max(row.get(None, 0) for row in self.rows)
            added += 8 * element * shape.kinds.head_dim * full * rows * self.length
        if checkpointing == "none":
            return float(shape.layers * layer), float(added)
        inputs = float(tokens * residual * shape.hidden)
        kept = inputs * (1 if self.runtime.offload_activations else shape.layers)
        if checkpointing == "attention":  # outputs of its kernels, and log-sum-exps
            heads = query // shape.kinds.head_dim
            kept += shape.layers * tokens * (element * query + _FLOAT32 * heads)
        return kept, float(layer + added)

    @property
    def _saved_per_token(self) -> float:
        """Bytes that autograd keeps of a token in a layer like Qwen3's.

        A norm keeps its input in float32, its result, and the result's copies for the maps after
        it; queries and keys are kept before and after norm and rotation, values and outputs once.
        A feed-forward block keeps four tensors of its width, experts also their inputs and outputs.
        Liger's kernels keep only inputs.
        """
        shape, element, residual = self.shape, self._element, self._residual
        mlp = residual if shape.experts else element  # autocast casts no experts
        if self.train.liger:
            norms, heads = 2 * (residual + element), (4 * element, 3 * element)
        else:
            copies = 4 * element if residual == element else 5 * element + 2 * residual
            norms, heads = 2 * _FLOAT32 + copies, (4 + 4 * element, 4 + 3 * element)
        size = norms * shape.hidden + heads[0] * shape.query_size + heads[1] * shape.key_value_size
        size += mlp * (4 - self.train.liger) * shape.active_width
        return size + mlp * 3 * shape.hidden * shape.experts_per_token

    def _scores(self, rows: int) -> float:
        """Bytes of a layer's scores: with capped ones attention has no fused kernel."""
        if not self.shape.softcap:
            return 0.0
        group = self.shape.query_size // self.shape.key_value_size
        keys = max(
            sum(
                heads * (min(self.length, 2 * window.max_keys) if window else self.length / 2)
                for window, heads in row.items()
            )
            for row in self.rows
        )
        size = rows * self.length * group * keys * (2 * _FLOAT32 + self._element)
        return size / self.runtime.context_parallel

    def _loss(self, tokens: int) -> float:
        """A chunk's logits with their copies, and gradients of states and of the head [V, C].

        The head's gradient is summed in float32 beside that of a chunk. A teacher has as many
        logits, and its states.
        """
        shape, train, element = self.shape, self.train, self._element
        models = 2 if train.teacher != "none" else 1
        words = min(tokens, chunk_tokens(shape.vocabulary, models == 2)) * shape.vocabulary
        logits = models * 3 * words * _FLOAT32
        if train.liger and models == 1:
            logits = element * tokens * shape.hidden  # a chunk has about as many numbers
        states = (1 if models == 1 else 3) * tokens * shape.hidden * element
        return float(logits + states + shape.table * (_FLOAT32 + element))


def chunk_tokens(vocabulary: int, distilled: bool = False) -> int:
    """Tokens whose logits are computed at a time; half as many with a teacher's logits."""
    return max(1, _CHUNK_ELEMENTS // ((1 + distilled) * vocabulary))
