"""Mix tokenised sources by weight, pack their documents and write the dataset."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.documents.tokenization import TokenisedSource

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a token that is not learnt
FILE_TOKENS = 128 * 2**20
BATCH_TOKENS = 2**20


class DocumentStream:
    """Endless documents of one source, in a new random order in each pass."""

    def __init__(self, tokenised: TokenisedSource, seed: int, number: int) -> None:
        self.name = tokenised.source.name
        self.available_tokens = tokenised.tokens
        self.documents = self.tokens = self.passes = 0
        self._blocks = tokenised.blocks
        counts = [block.documents for block in self._blocks]
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._seed = (seed, number)
        self._numbers = self._rows = np.empty(0, np.int64)  # block and row of each document
        self._next = 0

    @property
    def epochs(self) -> float:
        """Tokens read so far over the source's tokens; above 1 documents repeat."""
        return self.tokens / self.available_tokens

    def next(self) -> np.ndarray:
        """The next document's token ids, [n] int32, read-only."""
        if self._next == len(self._rows):
            self._shuffle()
        block, row = self._blocks[self._numbers[self._next]], self._rows[self._next]
        self._next += 1
        ids = block.ids[block.offsets[row] : block.offsets[row + 1]]
        self.documents += 1
        self.tokens += len(ids)
        return ids

    def _shuffle(self) -> None:
        if self.passes == 1:
            logger.warning(
                "source %s has only %s tokens and is repeated", self.name,
                f"{self.available_tokens:,}",
            )  # fmt: skip
        rng = np.random.default_rng([*self._seed, self.passes])
        order = rng.permutation(int(self._first[-1]))
        self._numbers = np.searchsorted(self._first, order, side="right") - 1
        self._rows = order - self._first[self._numbers]
        self._next = 0
        self.passes += 1


def mix(
    streams: Sequence[DocumentStream], weights: Sequence[float], tokens: int
) -> Iterator[np.ndarray]:
    """Documents of the streams, `tokens` tokens in all, mixed by weight.

    The next document comes from the source that is furthest behind its share, so a source is never
    a whole document ahead. The last document is cut; its stream does not count the rest.
    """
    shares = [weight / sum(weights) for weight in weights]
    emitted = [0] * len(streams)
    total = 0
    while total < tokens:
        gaps = [share * total - count for share, count in zip(shares, emitted, strict=True)]
        behind = gaps.index(max(gaps))
        document = streams[behind].next()
        if len(document) > tokens - total:
            streams[behind].tokens -= len(document) - (tokens - total)
            document = document[: tokens - total]
        emitted[behind] += len(document)
        total += len(document)
        yield document


@dataclass(frozen=True)
class Packed:
    """One sequence: signed ids [sequence_length] int32, and the lengths of its documents.

    The rest of a document that did not fit is a document of the next sequence.
    """

    signed: np.ndarray
    document_lengths: list[int]

    @property
    def input_ids(self) -> np.ndarray:
        return np.where(self.signed < 0, ~self.signed, self.signed)


def pack(documents: Iterable[np.ndarray], sequence_length: int) -> Iterator[Packed]:
    """Full sequences of the documents' tokens in order.

    Tokens at the end that do not fill a sequence are dropped.
    """
    buffer = np.empty(sequence_length, np.int32)
    filled = 0
    lengths: list[int] = []
    for document in documents:
        start = 0
        while start < len(document):
            piece = document[start : start + sequence_length - filled]
            buffer[filled : filled + len(piece)] = piece
            lengths.append(len(piece))
            filled += len(piece)
            start += len(piece)
            if filled == sequence_length:
                yield Packed(buffer.copy(), lengths)
                filled, lengths = 0, []


def write_dataset(
    folder: Path,
    sequences: Iterable[Packed],
    count: int,
    sequence_length: int,
    with_labels: bool = False,
) -> None:
    """Write `count` sequences in order, as a dataset that `datasets.load_from_disk` opens.

    Columns: `input_ids`, a list of `sequence_length` int32; `document_lengths`, a list of int32
    that sums to `sequence_length`; and
    `labels`, if wanted: the ids, with `IGNORED` for those that are not learnt.
    """
    from datasets import DatasetInfo, Features, Value
    from datasets import Sequence as ListOf

    columns = {
        "input_ids": ListOf(Value("int32"), length=sequence_length),
        "document_lengths": ListOf(Value("int32")),
    }
    if with_labels:
        columns["labels"] = columns["input_ids"]
    features = Features(columns)
    folder.mkdir(parents=True, exist_ok=True)
    per_file = max(1, FILE_TOKENS // sequence_length)
    starts = range(0, count, per_file)
    names = [f"data-{index:05d}-of-{len(starts):05d}.arrow" for index in range(len(starts))]
    iterator = iter(sequences)
    for name, start in zip(names, starts, strict=True):
        rows = itertools.islice(iterator, min(per_file, count - start))
        _write_file(folder / name, rows, sequence_length, features.arrow_schema)
    DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        **dict.fromkeys(("_format_columns", "_format_type", "_split")),
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": f"{count:x}-{sequence_length:x}",
        "_format_kwargs": {},
        "_output_all_columns": False,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))


def _write_file(path: Path, sequences: Iterator[Packed], length: int, schema: Any) -> None:
    import pyarrow as pa

    per_batch = max(1, BATCH_TOKENS // length)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(itertools.islice(sequences, per_batch)):
            signed = np.stack([packed.signed for packed in batch])
            columns = {
                "input_ids": _fixed_lists(np.where(signed < 0, ~signed, signed)),
                "document_lengths": [packed.document_lengths for packed in batch],
                "labels": _fixed_lists(np.where(signed < 0, IGNORED, signed)),
            }
            columns = {name: columns[name] for name in schema.names}
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema))


def _fixed_lists(rows: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
