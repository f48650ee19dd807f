"""The calibration set as batches of padded rows, equal for any number of ranks.

E examples, T tokens of the longest, A answer tokens of all, M most answer tokens of an example, C
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bosch.errors import UserError
from bosch.objective.calibration import MAX_ROUNDS, CalibrationExample, CalibrationSet
from bosch.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Right-padded examples; the state at `rows[i], columns[i]` predicts the token `answers[i]`."""

    examples: Tensor  # [E], indices in the calibration set
    input_ids: Tensor  # [E, T]
    rows: Tensor  # [A]
    columns: Tensor  # [A]
    answers: Tensor  # [A]

    @property
    def positions(self) -> int:
        """Number of positions E x T, padding included."""
        return self.input_ids.numel()

    @cached_property
    def answer_indices(self) -> Tensor:
        """Index of each answer token among those of its example, [A]."""
        counts = torch.bincount(self.rows, minlength=len(self.input_ids)).tolist()
        return torch.cat([torch.arange(count) for count in counts])

    @cached_property
    def answer_columns(self) -> Tensor:
        """`columns` by example and `answer_indices`, [E, M]; short rows repeat their first."""
        longest = int(self.answer_indices.max()) + 1
        first = self.columns[self.answer_indices == 0]
        columns = first[:, None].repeat(1, longest)
        columns[self.rows, self.answer_indices] = self.columns
        return columns


def batches_by_round(
    calibration: CalibrationSet, batch_size: int, vocabulary: int
) -> list[list[Batch]]:
    """Batches of each round, by length for little padding; UserError for an unknown token."""
    examples = calibration.examples
    highest = max(max(example.input_ids) for example in examples)
    if highest >= vocabulary:
        raise UserError(
            f"the calibration set holds the token id {highest:,}, the model's vocabulary ends at "
            f"{vocabulary - 1:,}: it was prepared with another tokenizer, run prepare again"
        )
    rounds = []
    for indices in examples_by_round(len(examples)):
        by_length = sorted(indices, key=lambda i: len(examples[i].input_ids))
        starts = range(0, len(indices), batch_size)
        rounds.append([batch_of(examples, by_length[i : i + batch_size]) for i in starts])
    return rounds


def examples_by_round(count: int) -> list[list[int]]:
    """Indices of `count` examples in up to `MAX_ROUNDS` consecutive rounds of nearly equal size."""
    rounds = np.array_split(np.arange(count), min(MAX_ROUNDS, count))
    return [indices.tolist() for indices in rounds]


def batch_of(examples: Sequence[CalibrationExample], indices: list[int]) -> Batch:
    """The batch of the examples at `indices`."""
    longest = max(len(examples[index].input_ids) for index in indices)
    input_ids = torch.zeros(len(indices), longest, dtype=torch.long)
    answers: list[tuple[int, int, int]] = []  # row, column, token
    for row, index in enumerate(indices):
        ids = examples[index].input_ids
        input_ids[row, : len(ids)] = torch.tensor(ids)
        first = len(ids) - examples[index].answer_length
        answers += [(row, column - 1, ids[column]) for column in range(first, len(ids))]
    return Batch(torch.tensor(indices), input_ids, *torch.tensor(answers).T)


def final_states(decoder: Any, batch: Batch, device: torch.device) -> Tensor:
    """A decoder's last hidden states [E, T, C] of a batch."""
    output = decoder(input_ids=batch.input_ids.to(device), use_cache=False)
    return output.last_hidden_state


def batches_of_rank(rounds: Sequence[Sequence[int]], ranks: Ranks) -> list[int]:
    """Indices of this rank's batches among those of all rounds; `rounds` has the sizes of batches.

    Gradients and evaluations that can end early take one round at a time, so each round is divided
    evenly: the largest batch first, to the rank with the fewest of this round, then the least work.
    """
    work = [0] * ranks.size
    assigned, offset = [], 0
    for sizes in rounds:
        batches = [0] * ranks.size
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            least = min(range(ranks.size), key=lambda rank: (batches[rank], work[rank]))
            batches[least] += 1
            work[least] += sizes[index]
            if least == ranks.rank:
                assigned.append(offset + index)
        offset += len(sizes)
    return sorted(assigned)
