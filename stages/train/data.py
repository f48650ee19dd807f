"""The order of the training data: a seeded permutation, each sequence once.

Shapes: B sequences of a micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk

from stages.train.loss import IGNORED
from stages.train.schedule import Schedule

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[dict[str, Any]]], Batch]

_ORDER_STREAM = 0x7261  # separates this use of the recipe's seed from others


class PackedSequences:
    """The packed sequences in the order training reads them, read from Arrow one at a time.

    Item i belongs to step i // sequences-per-step, whatever the number of processes.
    """

    def __init__(self, directory: Path) -> None:
        self._table = load_from_disk(str(directory)).with_format("numpy")
        self.prepared = len(self._table)
        self.sequence_length = len(self._table[0]["input_ids"]) if self.prepared else 0
        self._order = np.arange(self.prepared)
        self._read_count = self.prepared

    def arrange(self, schedule: Schedule, seed: int) -> None:
        """Set the order, and the part of it that `schedule` reads."""
        read_count = schedule.steps * schedule.sequences
        assert read_count <= self.prepared
        generator = np.random.default_rng([seed, _ORDER_STREAM])
        self._order = generator.permutation(self.prepared)
        self._read_count = read_count

    def __len__(self) -> int:
        return self._read_count

    def tokens_by_source(self, start: int, stop: int, count: int) -> np.ndarray:
        """Tokens of each of `count` sources in the items [start, stop), [count] int64."""
        names = ["document_sources", "document_lengths"]
        # All at once from Arrow: row by row, 70,000 rows took a minute after a restart.
        rows = self._table.select_columns(names).with_format("arrow")[self._order[start:stop]]
        sources, lengths = (rows[name].combine_chunks().flatten().to_numpy() for name in names)
        return np.bincount(sources, lengths, minlength=count).astype(np.int64)

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """`count` sequences that training does not read."""
        assert self._read_count + count <= self.prepared
        return [self[index] for index in range(self._read_count, self._read_count + count)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._table[int(self._order[index])]


class SourceTokens:
    """How many tokens of each source training has read, by the sources' names."""

    def __init__(self, data: PackedSequences, names: Sequence[str]) -> None:
        self._data, self._names = data, names
        self._tokens = np.zeros(len(names), np.int64)
        self._counted = 0  # sequences counted so far

    def until(self, stop: int) -> dict[str, int]:
        """Tokens of the first `stop` sequences; after a restart all are counted again."""
        if self._names:
            self._tokens += self._data.tokens_by_source(self._counted, stop, len(self._names))
        self._counted = stop
        return dict(zip(self._names, self._tokens.tolist(), strict=True))


def collate(rows: Sequence[dict[str, Any]]) -> Batch:
    """Plain causal language modelling: input_ids and labels [B, T]; the model shifts the labels."""
    names = "input_ids", "labels" if "labels" in rows[0] else "input_ids"
    ids, labels = (np.stack([row[name] for row in rows]).astype(np.int64) for name in names)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def collate_documents(rows: Sequence[dict[str, Any]]) -> Batch:
    """As `collate`, with attention stopping at document borders.

    position_ids [B, T] restart at 0 with every document, from which attention finds the borders; a
    document's first token cannot be predicted, so its label is ignored.
    """
    batch = collate(rows)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in row["document_lengths"].tolist()]) for row in rows]
    )
    batch["labels"].masked_fill_(positions == 0, IGNORED)
    return {**batch, "position_ids": positions}
