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

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[dict[str, Any]]], Batch]

_ORDER_STREAM = 0x7261  # separates this use of the recipe's seed from others


class PackedSequences:
    """The packed sequences in the order training reads them, read from Arrow one at a time.

    Item i belongs to step i // sequences-per-step, whatever the number of processes.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._table = load_from_disk(str(directory)).with_format("numpy")
        self.sequence_length = len(self._table[0]["input_ids"]) if len(self._table) else 0
        generator = np.random.default_rng([seed, _ORDER_STREAM])
        self._order = generator.permutation(len(self._table))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._table[int(self._order[index])]


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
