"""Mix tokenised sources by weight; each pass over a source has a newly drawn order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.tokenization import TokenisedSource

logger = logging.getLogger(__name__)


class DocumentStream:
    """Endless documents of one source: all of them in drawn order, then again in another order."""

    def __init__(self, tokenised: TokenisedSource, seed: int, number: int) -> None:
        self.name = tokenised.source.name
        self.available_tokens = tokenised.tokens
        self.documents = self.tokens = self.passes = 0
        self._blocks = tokenised.blocks
        counts = [block.documents for block in self._blocks]
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._seed = (seed, number)
        self._order = np.empty(0, np.int64)
        self._next = 0

    @property
    def epochs(self) -> float:
        """How often the source was read, in tokens; above 1 it repeats."""
        return self.tokens / self.available_tokens

    def next(self) -> np.ndarray:
        """The next document's token ids, [n] int32, read-only."""
        if self._next == len(self._order):
            self._shuffle()
        document = int(self._order[self._next])
        self._next += 1
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        block, row = self._blocks[number], document - int(self._first[number])
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
        self._order = rng.permutation(int(self._first[-1]))
        self._next = 0
        self.passes += 1


def mix(
    streams: Sequence[DocumentStream], weights: Sequence[float], tokens: int
) -> Iterator[np.ndarray]:
    """Documents in turn from the source that is furthest behind its share, `tokens` in all.

    At every moment a source is less than one document ahead of its share. The last document is cut
    where the tokens end; its rest is taken off the stream's count.
    """
    shares = np.asarray(weights, np.float64) / sum(weights)
    emitted = np.zeros(len(streams), np.int64)
    total = 0
    while total < tokens:
        behind = int(np.argmax(shares * total - emitted))
        document = streams[behind].next()
        if len(document) > tokens - total:
            streams[behind].tokens -= len(document) - (tokens - total)
            document = document[: tokens - total]
        emitted[behind] += len(document)
        total += len(document)
        yield document
