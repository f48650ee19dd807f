"""Scores during training: correct needle answers, and the loss on held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.objective.calibration import CalibrationSet
from stages.context import Runtime
from stages.search.stage import EXAMPLES
from stages.train.data import Batch, Collate, PackedSequences
from stages.train.loss import IGNORED, mistakes, token_losses
from stages.train.storage import processes, rank

T = TypeVar("T")

_PARTS = 4  # of a sequence, by position


class _Watch(Generic[T]):
    """Scores a model in training on `samples`, every `every` steps and at the end.

    `sharing` processes share each sample (`runtime.context_parallel`).
    """

    def __init__(self, samples: Sequence[T], every: int, sharing: int = 1) -> None:
        self._samples = samples
        self._every = every
        self._sharing = sharing

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether step `step` (from 1) ends with a score; the last one does."""
        return step % self._every == 0 or step == last_step

    def _samples_of_process(self, model: Any) -> Iterator[tuple[T, bool]]:
        """This process's samples, with `model` in evaluation mode, and whether each is a new one.

        All processes run the same number, since a sharded model's passes are collective: some
        repeat a sample.
        """
        size, group = processes() // self._sharing, rank() // self._sharing
        was_training = model.training
        model.eval()
        for number in range(group, len(self._samples) + group, size):
            yield self._samples[number % len(self._samples)], number < len(self._samples)
        model.train(was_training)


class NeedleWatch(_Watch[tuple[list[int], int]]):
    """Scores needle samples in one pass each, with the correct answer as input (BOSCH Eq. 4).

    A sample is token ids and the length of the answer at their end.
    """

    @torch.no_grad()
    def score(self, model: Any, device: torch.device) -> float:
        """The share of correct answers; called on every process, each with its share of samples."""
        is_first_of_group = rank() % self._sharing == 0
        correct = torch.zeros(1, dtype=torch.float64)
        for (ids, answer_length), is_new in self._samples_of_process(model):
            # Padding at the end changes nothing before it, and makes chunks equal for the processes
            # that share a sample.
            padding = -len(ids) % (2 * self._sharing) if self._sharing > 1 else 0
            input_ids = torch.tensor([ids + ids[-1:] * padding], device=device)
            labels = torch.full_like(input_ids, IGNORED)
            answer = slice(len(ids) - answer_length, len(ids))
            labels[:, answer] = input_ids[:, answer]
            wrong = model(input_ids=input_ids, labels=labels, measure=mistakes)["values"]
            correct += is_first_of_group and is_new and not wrong.any().item()
        return sum_over_processes(correct, device).item() / len(self._samples)


class HeldOutWatch(_Watch[Batch]):
    """The loss on sequences that training does not read.

    A sample is a batch of one sequence, with labels.
    """

    @torch.no_grad()
    def score(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Fields of `TrainingStep`; called on every process."""
        sums = torch.zeros(2, _PARTS, dtype=torch.float64)
        for batch, is_new in self._samples_of_process(model):
            inputs = {name: value.to(device) for name, value in batch.items()}
            losses = model(**inputs, measure=token_losses)["values"][0].cpu()
            # All processes that share a sequence have its losses.
            if is_new and rank() % self._sharing == 0:
                predicted = batch["labels"][0, 1:] != IGNORED
                parts = (values.tensor_split(_PARTS) for values in (losses[:-1], predicted))
                for part, (loss, counts) in enumerate(zip(*parts, strict=True)):
                    sums[:, part] += torch.stack([loss.double().sum(), counts.sum()])
        sums = sum_over_processes(sums, device)
        total, count = sums.sum(1).tolist()
        fields: dict[str, Any] = {}
        if count:  # a 0 without predictions would look like the best loss
            fields["heldout_loss"] = total / count
            fields["heldout_by_position"] = [
                loss / count if count else None for loss, count in sums.T.tolist()
            ]
        return fields


def sum_over_processes(values: Tensor, device: torch.device) -> Tensor:
    """The sum over all processes, on the CPU."""
    if processes() > 1:
        values = values.to(device)
        dist.all_reduce(values)
    return values.cpu()


def make_held_out_watch(
    data: PackedSequences, collate: Collate, runtime: Runtime
) -> HeldOutWatch | None:
    """The watch of held-out sequences of the recipe's runtime section, if it has one."""
    every = runtime.heldout_every_steps
    if every is None:
        return None
    rows = data.held_out(runtime.heldout_sequences)
    return HeldOutWatch([collate([row]) for row in rows], every, runtime.context_parallel)


def make_needle_watch(runtime: Runtime, inputs: Mapping[str, Path]) -> NeedleWatch | None:
    """The watch of needles of the recipe's runtime section, if it has one.

    Its samples are the first of the search's calibration set.
    """
    if runtime.needle_every_steps is None:
        return None
    examples = CalibrationSet.load(inputs["search"] / EXAMPLES).examples[: runtime.needle_samples]
    samples = [(list(example.input_ids), example.answer_length) for example in examples]
    return NeedleWatch(samples, runtime.needle_every_steps, runtime.context_parallel)
