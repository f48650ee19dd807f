"""The calibration set as batches of padded rows, equal for any number of ranks.

E examples, T tokens of the longest, A answer tokens of all, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bosch.errors import UserError
from bosch.ranks import Ranks
from bosch.score.calibration import PARTS, CalibrationExample, CalibrationSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def batches_by_part(
    calibration: CalibrationSet, batch_size: int, vocabulary: int
) -> list[list[Batch]]:
    """Batches of each part, by length for little padding; UserError for an unknown token."""
    examples = calibration.examples
    check_vocabulary((example.input_ids for example in examples), vocabulary)
    parts = []
    for indices in examples_by_part(len(examples)):
        by_length = sorted(indices, key=lambda i: len(examples[i].input_ids))
        starts = range(0, len(indices), batch_size)
        parts.append([batch_of(examples, by_length[i : i + batch_size]) for i in starts])
    return parts


def check_vocabulary(texts: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Raise UserError for a token that the model does not know."""
    highest = max(map(max, texts))
    if highest >= vocabulary:
        raise UserError(
            f"the calibration set holds the token id {highest:,}, the model's vocabulary ends at "
            f"{vocabulary - 1:,}: it was prepared with another tokenizer, run prepare again"
        )


def examples_by_part(count: int) -> list[list[int]]:
    """Indices of `count` examples in up to `PARTS` consecutive parts of nearly equal size."""
    return [part.tolist() for part in np.array_split(np.arange(count), min(PARTS, count))]


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


def final_states(decoder: PreTrainedModel, input_ids: Tensor, device: torch.device) -> Tensor:
    """A decoder's last hidden states [E, T, C] for ids [E, T]."""
    output = decoder(input_ids=input_ids.to(device), use_cache=False)
    return output.last_hidden_state


def batches_of_rank(parts: Sequence[Sequence[int]], ranks: Ranks) -> list[int]:
    """Indices of this rank's batches among those of all parts; `parts` has the sizes of batches.

    A gradient may take one part at a time, so each part is divided evenly: the largest batch first,
    to the rank with the fewest of this part, then the least work.
    """
    work = [0] * ranks.size
    assigned, offset = [], 0
    for sizes in parts:
        batches = [0] * ranks.size
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            least = min(range(ranks.size), key=lambda rank: (batches[rank], work[rank]))
            batches[least] += 1
            work[least] += sizes[index]
            if least == ranks.rank:
                assigned.append(offset + index)
        offset += len(sizes)
    return sorted(assigned)
