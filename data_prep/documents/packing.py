"""Mix tokenised sources by weight, pack their documents and write the dataset."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bosch.progress import Progress
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
    streams: Sequence[DocumentStream], shares: Sequence[float], tokens: int
) -> Iterator[np.ndarray]:
    """Documents of the streams, `tokens` tokens in all, mixed by shares that sum to 1.

    The next document comes from the source that is furthest behind its share, so a source is never
    a whole document ahead. The last document is cut; its stream does not count the rest.
    """
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
    pieces, filled = list[np.ndarray](), 0
    for document in documents:
        while len(document):
            pieces.append(document[: sequence_length - filled])
            document = document[len(pieces[-1]) :]
            filled += len(pieces[-1])
            if filled == sequence_length:
                yield Packed(np.concatenate(pieces), [len(piece) for piece in pieces])
                pieces, filled = [], 0


def write_dataset(
    folder: Path, sequences: Iterable[Packed], length: int, with_labels: bool, bar: Progress
) -> int:
    """Write a dataset that `datasets.load_from_disk` opens; returns the highest token.

    Columns: `input_ids`, a list of `length` int32; `document_lengths`, a list of int32 that sums
    to `length`; and `labels`, if wanted: the ids, with `IGNORED` for those that are not learnt.
    """
    from datasets import DatasetInfo, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    tokens = List(Value("int32"), length=length)
    columns = {"input_ids": tokens, "document_lengths": List(Value("int32"))}
    features = Features(columns | ({"labels": tokens} if with_labels else {}))
    folder.mkdir(parents=True, exist_ok=True)
    file, rows = "data-00000-of-00001.arrow", max(1, BATCH_TOKENS // length)
    path, highest = str(folder / file), 0
    with ArrowWriter(features=features, path=path, writer_batch_size=rows) as writer:
        for signed, lengths in sequences:
            ids = np.maximum(signed, ~signed)
            row: dict[str, Any] = {"input_ids": ids, "document_lengths": lengths}
            highest = max(highest, int(ids.max()))
            if with_labels:
                row["labels"] = np.where(signed < 0, IGNORED, signed)
            writer.write(row)
            bar.update()
        writer.finalize()
    DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        **dict.fromkeys(("_format_columns", "_format_type", "_split")),
        "_data_files": [{"filename": file}], "_fingerprint": "packed",
        "_format_kwargs": {}, "_output_all_columns": False,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return highest
