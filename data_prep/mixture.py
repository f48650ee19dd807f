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
        self._numbers = self._rows = np.empty(0, np.int64)  # of blocks, and of documents in them
        self._next = 0

    @property
    def epochs(self) -> float:
        """How often the source was read, in tokens; above 1 it repeats."""
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
    """Documents in turn from the source that is furthest behind its share, `tokens` in all.

    At every moment a source is less than one document ahead of its share. The last document is cut
    where the tokens end; its rest is taken off the stream's count.
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
