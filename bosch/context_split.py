"""A sequence split over n processes: which tokens each holds, and which it is sent. Needs no torch.

A sequence of T tokens is cut into 2n chunks of C = T / 2n. Process r of n holds the chunks r and
2n - 1 - r: under causal attention a late chunk sees more keys than an early one, and so every
process has as much to compute. Of a full head each process is sent the keys and values of all
tokens (all-gather), also of later ones, which it does not attend to. A sliding head with window W
needs, for each of the two chunks, the W - 1 tokens before it (its halo, of as many chunks as that
takes) and the sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bosch.window import Window


@dataclass(frozen=True)
class ContextSplit:
    """A sequence of `length` tokens over `ranks` processes.

    Raises ValueError where there is no process, or the sequence cannot be cut into 2n chunks of
    whole tokens.
    """

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.length % (2 * self.ranks):
            raise ValueError(f"{self.length} tokens cannot be cut into {2 * self.ranks} chunks")

    @classmethod
    def padded(cls, length: int, ranks: int) -> ContextSplit:
        """The split of a sequence of `length` tokens and as many more as fill its last chunk."""
        return cls(length + -length % (2 * ranks), ranks)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, C."""
        return self.length // (2 * self.ranks)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The two chunks of a process, in order."""
        return rank, 2 * self.ranks - 1 - rank

    def halo_start(self, chunk: int, window: Window) -> int:
        """First slot that a sliding head sees from a chunk, sinks aside."""
        return max(0, chunk * self.chunk - window.past)

    def received(self, rank: int, window: Window | None) -> int:
        """Tokens whose keys and values a process is sent for a head, in a sequence of one document.

        None is a full head. In a sequence of several documents each has sinks of its own, so a
        chunk may be sent up to S tokens more; they are not counted.
        """
        held = [range(c * self.chunk, (c + 1) * self.chunk) for c in self.chunks_of(rank)]
        needed = [range(self.length)]
        if window is not None:
            starts = [self.halo_start(c, window) for c in self.chunks_of(rank)]
            needed = [range(s, o.stop) for s, o in zip(starts, held, strict=True)]
            needed += [range(min(s, window.sinks)) for s in starts]
        return sum(map(len, _outside(needed, held)))

    def traffic(self, window: Window | None) -> int:
        """Tokens that all processes together are sent for a head; its gradients go back likewise.

        (n - 1) T of a full one; of a sliding one, for W - 1 <= C, 2 (n - 1) (W - 1) and the sinks.
        """
        return sum(self.received(rank, window) for rank in range(self.ranks))


def _outside(needed: list[range], held: list[range]) -> Iterator[range]:
    """The slots of `needed` that are not among `held`, each once."""
    for first, stop in pairwise(sorted({end for r in needed + held for end in (r.start, r.stop)})):
        if any(first in r for r in needed) and not any(first in r for r in held):
            yield range(first, stop)
