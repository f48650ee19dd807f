"""The sliding window: one value, and what each backend, cache and formula makes of it.

A sliding head with window W lets query t see keys j with t - W < j <= t: W keys, itself included
(BOSCH §2.1). With S sinks it also sees the first S tokens of its document. A window is never
converted anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

# Longer blocks compute more pairs outside the window, shorter ones keep a kernel less busy.
_MAX_BLOCK = 128


@dataclass(frozen=True)
class Window:
    """Keys of a sliding head: the last `size`, the query's own included, and the first `sinks`.

    Raises ValueError unless both are integers, `size` at least 1 and `sinks` at least 0.
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        size, sinks = self.size, self.sinks
        if type(size) is not int or size < 1 or type(sinks) is not int or sinks < 0:
            raise ValueError(
                "window_size must be an integer of at least 1 and sinks one of at least 0, found "
                f"{size!r} and {sinks!r}"
            )

    def __str__(self) -> str:
        return f"{self.size:,} with {self.sinks} sinks" if self.sinks else f"{self.size:,}"

    @property
    def flash(self) -> tuple[int, int]:
        """flash-attn's `window_size=(left, right)`: keys seen besides the query's own position."""
        return self.size - 1, 0

    @property
    def transformers(self) -> int:
        """transformers' `sliding_window`: it counts the query's own position too."""
        return self.size

    @property
    def vllm(self) -> int:
        """vLLM's `per_layer_sliding_window`: it counts the query's own position too."""
        return self.size

    @property
    def past(self) -> int:
        """Past keys the next query can still see, sinks aside: W - 1."""
        return self.size - 1

    @property
    def most_keys(self) -> int:
        """Most keys a query sees; longer texts are where a sliding head differs from a full one."""
        return self.size + self.sinks


def block_size(window: int) -> int:
    """Queries that the sdpa backend computes together in a sliding head, C."""
    return max(16, min(_MAX_BLOCK, window))
