"""The calibration set as batches of padded examples, the same for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bosch.calibration import CalibrationExample, CalibrationSet
from bosch.errors import UserError
from bosch.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Right-padded examples. Position `rows[i], columns[i]` predicts `answers[i]`."""

    examples: Tensor  # [B], their places in the calibration set
    input_ids: Tensor  # [B, T]
    rows: Tensor  # [A]
    columns: Tensor  # [A]
    answers: Tensor  # [A]

    @property
    def size(self) -> int:
        """Positions, padding included."""
        return self.input_ids.numel()

    @cached_property
    def places(self) -> Tensor:
        """Number of each answer token within its row, [A]."""
        counts = torch.bincount(self.rows, minlength=len(self.examples)).tolist()
        return torch.cat([torch.arange(count) for count in counts])

    @cached_property
    def slots(self) -> Tensor:
        """Columns that predict each row's answer, [B, most]; short rows repeat their first."""
        most = int(self.places.max()) + 1
        first = self.columns[self.places == 0]
        slots = first[:, None].repeat(1, most)
        slots[self.rows, self.places] = self.columns
        return slots


def cut(
    calibration: CalibrationSet, parts: int, batch_size: int, vocabulary: int
) -> list[list[Batch]]:
    """Each part's batches: examples in their order make parts, and within one go by length.

    Raises UserError when the set holds a token that a model of `vocabulary` does not know.
    """
    examples = calibration.examples
    highest = max(max(example.input_ids) for example in examples)
    if highest >= vocabulary:
        raise UserError(
            f"the calibration set holds token {highest}, the model knows {vocabulary}: it was "
            "prepared with another tokenizer, run prepare again"
        )
    result = []
    for part in np.array_split(np.arange(len(examples)), parts):
        order = sorted(part.tolist(), key=lambda place: len(examples[place].input_ids))
        rows = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
        result.append([batch_of([examples[place] for place in row], row) for row in rows])
    return result


def batch_of(examples: list[CalibrationExample], places: list[int]) -> Batch:
    """One batch of `examples`, which have `places` in the calibration set."""
    width = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), width, dtype=torch.long)
    rows: list[int] = []
    columns: list[int] = []
    answers: list[int] = []
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.tensor(example.input_ids)
        first = length - example.answer_length
        rows += [row] * example.answer_length
        columns += range(first - 1, length - 1)
        answers += example.input_ids[first:]
    indices = (torch.tensor(values) for values in (rows, columns, answers))
    return Batch(torch.tensor(places), input_ids, *indices)


def dealt(sizes: list[int], ranks: Ranks) -> list[int]:
    """Batches of this rank: the largest first, each to the rank that has least to do."""
    work = [0] * ranks.size
    mine = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = work.index(min(work))
        work[least] += sizes[index]
        if least == ranks.rank:
            mine.append(index)
    return sorted(mine)
