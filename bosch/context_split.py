"""A sequence split over n processes: the tokens that each holds and receives. Needs no torch.

A sequence of T tokens is cut into 2n chunks of C = T / 2n. Process r of n holds the chunks r and
2n - 1 - r: under causal attention a late chunk sees more keys than an early one, so this balances
the work. For a full head each process receives the keys and values of all tokens (all-gather), also
of later ones, which it does not use. For a sliding head with window W it receives, for each of the
two chunks, the W - 1 tokens before it (its halo, which may span several chunks) and the sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bosch.window import Window


@dataclass(frozen=True)
class ContextSplit:
    """`length` tokens over `ranks` processes; ValueError unless they make 2n equal chunks."""

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.length % (2 * self.ranks):
            raise ValueError(f"{self.length} tokens cannot be cut into {2 * self.ranks} chunks")

    @classmethod
    def padded(cls, length: int, ranks: int) -> ContextSplit:
        """The split of a sequence of `length` tokens, padded to whole chunks."""
        return cls(length + -length % (2 * ranks), ranks)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, C."""
        return self.length // (2 * self.ranks)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The two chunks of a process, in order."""
        return rank, 2 * self.ranks - 1 - rank

    def halo_start(self, chunk: int, window: Window) -> int:
        """First slot, apart from sinks, that a sliding head sees from a chunk."""
        return max(0, chunk * self.chunk - window.past)

    def received(self, rank: int, window: Window | None) -> int:
        """Tokens whose keys and values a process receives for a head, with one document.

        `window` is None for a full head. The sinks of further documents, up to S, are not counted.
        """
        held = [range(c * self.chunk, (c + 1) * self.chunk) for c in self.chunks_of(rank)]
        needed = [range(self.length)]
        if window is not None:
            starts = [self.halo_start(c, window) for c in self.chunks_of(rank)]
            needed = [range(start, c.stop) for start, c in zip(starts, held, strict=True)]
            needed += [range(min(start, window.sinks)) for start in starts]
        return sum(map(len, _outside(needed, held)))

    def traffic(self, window: Window | None) -> int:
        """Tokens all receive: (n - 1) T if full, 2 (n - 1) (W - 1) and the sinks if W <= C + 1."""
        return sum(self.received(rank, window) for rank in range(self.ranks))


def _outside(needed: list[range], held: list[range]) -> Iterator[range]:
    """The slots of `needed` that are not among `held`, each once."""
    for first, stop in pairwise(sorted({end for r in needed + held for end in (r.start, r.stop)})):
        if any(first in r for r in needed) and not any(first in r for r in held):
            yield range(first, stop)
