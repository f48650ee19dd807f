"""The calibration set as batches of padded rows, the same for any number of ranks.

R rows, T slots of a row, E examples, A answer tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bosch.branches import Branches
from bosch.calibration import CalibrationExample, CalibrationSet
from bosch.errors import UserError
from bosch.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Right-padded rows, of one example each or of several that share their text (`branches`).

    Position `rows[i], columns[i]` predicts `answers[i]` of example number `owners[i]`.
    """

    examples: Tensor  # [E], their places in the calibration set
    longest: int  # tokens of the longest example
    input_ids: Tensor  # [R, T]
    rows: Tensor  # [A]
    columns: Tensor  # [A]
    answers: Tensor  # [A]
    owners: Tensor  # [A]
    branches: Branches | None = None

    @property
    def size(self) -> int:
        """Positions, padding included."""
        return self.input_ids.numel()

    @cached_property
    def places(self) -> Tensor:
        """Number of each answer token within its row, [A]."""
        counts = torch.bincount(self.rows, minlength=len(self.input_ids)).tolist()
        return torch.cat([torch.arange(count) for count in counts])

    @cached_property
    def slots(self) -> Tensor:
        """Columns that predict each row's answers, [R, most]; short rows repeat their first."""
        most = int(self.places.max()) + 1
        first = self.columns[self.places == 0]
        slots = first[:, None].repeat(1, most)
        slots[self.rows, self.places] = self.columns
        return slots


def cut(
    calibration: CalibrationSet, parts: int, batch_size: int, vocabulary: int
) -> list[list[Batch]]:
    """Each part's batches: examples in their order make parts, and within one go by length.

    Examples that share their text are one row; a batch has at most `batch_size` rows. Raises
    UserError when the set holds a token that a model of `vocabulary` does not know.
    """
    examples = calibration.examples
    highest = max(max(example.input_ids) for example in examples)
    if highest >= vocabulary:
        raise UserError(
            f"the calibration set holds token {highest}, the model knows {vocabulary}: it was "
            "prepared with another tokenizer, run prepare again"
        )
    result = []
    haystacks = calibration.haystacks
    for part in np.array_split(np.arange(len(haystacks)), parts):
        rows = sorted(
            (haystacks[number] for number in part),
            key=lambda row: max(len(examples[place].input_ids) for place in row),
        )
        result.append(
            [
                batch_of(examples, rows[first : first + batch_size])
                for first in range(0, len(rows), batch_size)
            ]
        )
    return result


def batch_of(examples: Sequence[CalibrationExample], haystacks: list[list[int]]) -> Batch:
    """One batch of the `examples` at the places in `haystacks`, each of which makes a row."""
    places = [place for row in haystacks for place in row]
    longest = max(len(examples[place].input_ids) for place in places)
    branched = len(places) > len(haystacks)
    texts = [0] * len(haystacks)
    if branched:
        texts = [_text_length([examples[place] for place in row]) for row in haystacks]
    trunk = max(texts)
    tails = [
        sum(len(examples[place].input_ids) - text for place in row)
        for row, text in zip(haystacks, texts, strict=True)
    ]
    input_ids = torch.zeros(len(haystacks), trunk + max(tails), dtype=torch.long)
    positions = torch.arange(trunk + max(tails)).repeat(len(haystacks), 1)
    parts = torch.full_like(input_ids, -1)
    answers: list[tuple[int, int, int, int]] = []  # row, column, token, example
    owner = 0
    for row, (members, text) in enumerate(zip(haystacks, texts, strict=True)):
        input_ids[row, :text] = torch.tensor(examples[members[0]].input_ids[:text])
        parts[row, :text] = 0
        start = trunk
        for number, place in enumerate(members, start=1):
            ids = examples[place].input_ids
            stop = start + len(ids) - text
            input_ids[row, start:stop] = torch.tensor(ids[text:])
            positions[row, start:stop] = torch.arange(text, len(ids))
            parts[row, start:stop] = number
            first = stop - examples[place].answer_length
            answers += [(row, c - 1, ids[c - stop], owner) for c in range(first, stop)]
            start, owner = stop, owner + 1
    branches = Branches(trunk, positions, parts) if branched else None
    rows, columns, tokens, owners = torch.tensor(answers).T
    return Batch(torch.tensor(places), longest, input_ids, rows, columns, tokens, owners, branches)


def _text_length(members: list[CalibrationExample]) -> int:
    """Ids of a row's text; what follows must hold the tokens that predict an answer.

    One example alone may be divided anywhere.
    """
    if len(members) > 1:
        return members[0].shared_length
    return len(members[0].input_ids) - members[0].answer_length - 1


def final_states(decoder: Any, batch: Batch, device: torch.device) -> Tensor:
    """Run a decoder over a batch: its last hidden states [R, T, C]."""
    positions = {}
    if batch.branches is not None:
        positions["position_ids"] = batch.branches.positions.to(device)
    output = decoder(input_ids=batch.input_ids.to(device), use_cache=False, **positions)
    states: Tensor = output.last_hidden_state
    return states


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
