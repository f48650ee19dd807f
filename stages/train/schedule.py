"""The steps and batches of a training run, computed from the recipe without torch.

A step is one optimiser update over `batch_tokens` tokens: `sequences` packed sequences, split
evenly over the processes (or groups of processes that share a sequence) and, within one, over
`accumulation` forward passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bosch.budget import share_of
from bosch.errors import UserError
from stages.context import Runtime
from stages.train.stage import TrainConfig, batch_faults

_CPU_MICRO_BATCH_TOKENS = 2048  # about what fits into a core's cache


@dataclass(frozen=True)
class Schedule:
    """Steps, batches and checkpoints of one run."""

    sequence_length: int
    sequences: int  # per step, over all processes
    micro_batch_size: int  # sequences per forward pass and process
    accumulation: int  # forward passes per step and process
    steps: int
    warmup_steps: int
    decay_steps: int  # the last steps, over which a cosine or a line falls
    is_cosine: bool
    min_lr_ratio: float
    checkpoint_steps: dict[int, int]  # requested tokens -> step after which they are reached

    @property
    def batch_tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run: whole steps only, so at most `total_tokens`."""
        return self.steps * self.batch_tokens

    def learning_rate_factor(self, step: int) -> float:
        """Learning rate of step `step` (from 0) over the peak: a linear rise, then the fall.

        The rise starts at 1 / warm-up steps and the fall would reach `min_lr_ratio` one step after
        the last, so that no step is spent at a rate of 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = step - (self.steps - self.decay_steps) + 1  # steps of the fall, this one included
        progress = min(max(done, 0) / (self.decay_steps + 1), 1.0)
        fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.is_cosine else 1.0 - progress
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * fall


def make_schedule(
    train: TrainConfig, runtime: Runtime, sequence_length: int, world_size: int, on_gpu: bool
) -> Schedule:
    """The schedule of a run with `world_size` processes.

    Raises UserError with the first of `batch_faults`.
    """
    for fault in batch_faults(train, runtime, sequence_length, world_size):
        raise UserError(fault.text, fault.path)
    sequences = train.batch_tokens // sequence_length
    steps = train.optimizer_steps
    own_sequences = sequences // (world_size // runtime.context_parallel)
    micro_batch_size = _micro_batch_size(runtime, own_sequences, sequence_length, on_gpu)
    warmup_steps, is_cosine = share_of(steps, train.warmup_ratio), train.schedule == "cosine"
    after = steps - warmup_steps
    decay_steps = after if is_cosine else min(after, share_of(steps, train.decay_ratio))
    return Schedule(
        sequence_length=sequence_length,
        sequences=sequences,
        micro_batch_size=micro_batch_size,
        accumulation=own_sequences // micro_batch_size,
        steps=steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        is_cosine=is_cosine,
        min_lr_ratio=train.min_lr_ratio,
        checkpoint_steps=train.checkpoint_steps,
    )


def _micro_batch_size(runtime: Runtime, sequences: int, sequence_length: int, on_gpu: bool) -> int:
    if runtime.micro_batch_size != "auto":
        return runtime.micro_batch_size
    if on_gpu:
        return 1
    largest = max(1, _CPU_MICRO_BATCH_TOKENS // sequence_length)
    sizes = range(1, min(largest, sequences) + 1)
    return max(size for size in sizes if sequences % size == 0)
