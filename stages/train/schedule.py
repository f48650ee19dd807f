"""How a training run is cut into steps and batches: arithmetic over the recipe, no torch.

A step is one optimiser update over `batch_tokens` tokens: `sequences` packed sequences, split
evenly over the processes and, within a process, over `accumulation` forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bosch.errors import UserError
from stages.context import Runtime
from stages.train.stage import TrainConfig

_CPU_MICRO_BATCH_TOKENS = 2048  # what a core works on without leaving its cache


@dataclass(frozen=True)
class Schedule:
    """Steps, batches and checkpoints of one run."""

    sequence_length: int
    sequences: int  # per step, over all processes
    micro_batch_size: int  # sequences per forward pass and process
    accumulation: int  # forward passes per step and process
    steps: int
    warmup_steps: int
    min_lr_ratio: float
    checkpoint_steps: dict[int, int]  # requested tokens -> step after which they are reached

    @property
    def batch_tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole run: whole steps only, so at most `total_tokens`."""
        return self.steps * self.batch_tokens

    def learning_rate_factor(self, step: int) -> float:
        """Learning rate of step `step` (from 0) over the peak: linear rise, then half a cosine.

        The rise starts at 1 / warm-up steps and the cosine would reach `min_lr_ratio` one step
        after the last, so that no step is spent at a rate of 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps + 1) / (self.steps - self.warmup_steps + 1)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine


def make_schedule(
    train: TrainConfig, runtime: Runtime, sequence_length: int, world_size: int, on_gpu: bool
) -> Schedule:
    """The schedule of a run with `world_size` processes.

    Raises:
        UserError: the first of `batch_faults`.
    """
    for fault in batch_faults(train, runtime, sequence_length, world_size):
        raise UserError(fault)
    sequences = train.batch_tokens // sequence_length
    steps = optimizer_steps(train)
    micro = _micro_batch(runtime, sequences // world_size, sequence_length, on_gpu)
    return Schedule(
        sequence_length=sequence_length,
        sequences=sequences,
        micro_batch_size=micro,
        accumulation=sequences // world_size // micro,
        steps=steps,
        warmup_steps=math.ceil(train.warmup_ratio * steps),
        min_lr_ratio=train.min_lr_ratio,
        checkpoint_steps=checkpoint_steps(train),
    )


def batch_faults(
    train: TrainConfig, runtime: Runtime, sequence_length: int, world_size: int
) -> Iterator[str]:
    """Why a batch does not split evenly over `world_size` processes, or is more than the run."""
    if optimizer_steps(train) == 0:
        yield (
            f"train.total_tokens: {train.total_tokens:,} is less than one batch "
            f"(train.batch_tokens = {train.batch_tokens:,})"
        )
    if train.batch_tokens % sequence_length:
        yield (
            f"train.batch_tokens: {train.batch_tokens:,} is no multiple of "
            f"prepare.sequence_length = {sequence_length:,}"
        )
        return
    sequences = train.batch_tokens // sequence_length
    micro = 1 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    if sequences % (micro * world_size):
        yield (
            f"train.batch_tokens: a batch of {sequences} sequences cannot be divided into micro "
            f"batches of {micro} (runtime.micro_batch_size) on {world_size} process(es) "
            "(runtime.processes)"
        )


def optimizer_steps(train: TrainConfig) -> int:
    """Optimiser steps of a training: whole batches only (2.5B tokens of 2M make 1,192)."""
    return train.total_tokens // train.batch_tokens


def checkpoint_steps(train: TrainConfig) -> dict[int, int]:
    """Step at whose end each requested count is reached; the end of the run is always kept.

    Counts behind the last whole step belong to the last step: 2.5B tokens in steps of 2M end at
    2,499,805,184 (1,192 steps, as in the paper).
    """
    last = max(optimizer_steps(train), 1)
    steps = {n: min(-(-n // train.batch_tokens), last) for n in train.checkpoint_tokens}
    if last not in steps.values():
        steps[train.total_tokens] = last
    return steps


def _micro_batch(runtime: Runtime, sequences: int, sequence_length: int, on_gpu: bool) -> int:
    """Sequences per forward pass out of `sequences` per process and step."""
    if runtime.micro_batch_size != "auto":
        return runtime.micro_batch_size
    if on_gpu:
        return 1
    largest = max(1, _CPU_MICRO_BATCH_TOKENS // sequence_length)
    return max(m for m in range(1, min(largest, sequences) + 1) if sequences % m == 0)
