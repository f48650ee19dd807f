"""A sequence split over n processes: the tokens that each holds and receives. Needs no torch.

A sequence of T tokens is cut into 2n chunks of C = T / 2n. Process r of n holds the chunks r and
2n - 1 - r: under causal attention a late chunk sees more keys than an early one, so this balances
the work. For a full head each process receives the keys and values of all tokens (all-gather), also
of later ones, which it does not use. For a sliding head with window W it receives, for each of the
two chunks, the W - 1 tokens before it (its halo, which may span several chunks) and the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from bosch.window import Window


@dataclass(frozen=True)
class ContextSplit:
    """`length` tokens over `ranks` processes; ValueError unless they make 2n equal chunks."""

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.length % (2 * self.ranks):
            raise ValueError(f"{self.length} tokens cannot be cut into {2 * self.ranks} chunks")

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
