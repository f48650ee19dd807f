"""Mix tokenised sources by weight, pack their documents and write the dataset."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.documents.tokenization import Tokenised

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a token that is not learnt
BATCH_TOKENS = 2**20


class DocumentStream:
    """Endless documents of one source, in a new random order in each pass."""

    def __init__(self, tokenised: Tokenised) -> None:
        self.tokenised = tokenised
        self.documents = self.tokens = 0
        self._endless = self._passes()

    def next(self) -> np.ndarray:
        """The next document's token ids, [n] int32, read-only."""
        ids = next(self._endless)
        self.documents += 1
        self.tokens += len(ids)
        return ids

    def _passes(self) -> Iterator[np.ndarray]:
        ids, offsets, source = self.tokenised.ids, self.tokenised.offsets, self.tokenised.source
        for number in itertools.count():
            if number == 1:
                logger.warning(
                    "source %s has only %s tokens and is repeated", source.name, f"{len(ids):,}"
                )
            order = np.random.default_rng([source.seed, number]).permutation(len(offsets) - 1)
            yield from (ids[offsets[row] : offsets[row + 1]] for row in order)


def mix(
    streams: Sequence[DocumentStream], weights: Sequence[float], tokens: int
) -> Iterator[np.ndarray]:
    """Documents of the streams, `tokens` tokens in all, mixed by weight.

    The next document comes from the source that is furthest behind its share, so a source is never
    a whole document ahead. The last document is cut; its stream does not count the rest.
    """
    shares = [weight / sum(weights) for weight in weights]
    while (total := sum(stream.tokens for stream in streams)) < tokens:
        gaps = [share * total - s.tokens for share, s in zip(shares, streams, strict=True)]
        behind = streams[gaps.index(max(gaps))]
        document = behind.next()
        surplus = max(0, len(document) - (tokens - total))
        behind.tokens -= surplus
        yield document[: len(document) - surplus]


class Packed(NamedTuple):
    """One sequence; the rest of a document that did not fit is a document of the next one."""

    signed: np.ndarray  # [sequence_length] int32
    document_lengths: list[int]


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
    folder: Path, sequences: Iterable[Packed], sequence_length: int, with_labels: bool = False
) -> None:
    """Write a dataset that `datasets.load_from_disk` opens.

    Columns: `input_ids`, a list of `sequence_length` int32; `document_lengths`, a list of int32
    that sums to `sequence_length`; and `labels`, if wanted: the ids, with `IGNORED` for those that
    are not learnt.
    """
    from datasets import DatasetInfo, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    tokens = List(Value("int32"), length=sequence_length)
    columns = {"input_ids": tokens, "document_lengths": List(Value("int32"))}
    features = Features(columns | ({"labels": tokens} if with_labels else {}))
    folder.mkdir(parents=True, exist_ok=True)
    file, rows = "data-00000-of-00001.arrow", max(1, BATCH_TOKENS // sequence_length)
    path = str(folder / file)
    with ArrowWriter(features=features, path=path, writer_batch_size=rows) as writer:
        for signed, lengths in sequences:
            row = {"input_ids": np.maximum(signed, ~signed), "document_lengths": lengths}
            labels = np.where(signed < 0, IGNORED, signed)
            writer.write(row | ({"labels": labels} if with_labels else {}))
        writer.finalize()
    DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        **dict.fromkeys(("_format_columns", "_format_type", "_split")),
        "_data_files": [{"filename": file}], "_fingerprint": "packed",
        "_format_kwargs": {}, "_output_all_columns": False,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2))
