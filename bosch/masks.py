"""The head mask: the window of every KV head, and what follows from it.

L layers with full attention in the base model, HKV key/value heads per layer. The unit of decision
is the KV head with the query heads that share it (BOSCH §2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from bosch.window import Window


@dataclass(frozen=True)
class HeadMask:
    """z of the paper: `windows[l][h]` is 0 if KV head h of layer l is full, else its window.

    Heads are in the base model's order. A window counts the query's own key; sliding heads also see
    the first `sinks` tokens, which are 0 if no head slides. Rows may be given as lists. Raises
    ValueError unless the rows are of equal length and hold windows.
    """

    windows: tuple[tuple[int, ...], ...]  # [L][HKV]
    sinks: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.windows, list | tuple) or not all(
            isinstance(row, list | tuple) and all(type(size) is int for size in row)
            for row in self.windows
        ):
            raise ValueError("windows must hold a list of integers for each layer")
        rows = tuple(tuple(row) for row in self.windows)
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise ValueError(
                "windows must hold the same number of KV heads, at least one, for each layer"
            )
        sizes = {size for row in rows for size in row} - {0}
        for size in sizes:
            Window(size, self.sinks)  # raises ValueError
        object.__setattr__(self, "windows", rows)
        object.__setattr__(self, "sinks", self.sinks if sizes else 0)

    @classmethod
    def of(cls, is_full: Any, window: Window) -> HeadMask:
        """Mask whose heads are full where `is_full` [L, HKV] is true, with `window` elsewhere."""
        rows = tuple(tuple(0 if full else window.size for full in row) for row in is_full)
        return cls(rows, window.sinks)

    @classmethod
    def evenly(cls, layers: int, heads: int, sliding: int, window: Window) -> HeadMask:
        """Mask with `sliding` sliding heads, spread evenly over the layers, the last of each.

        Speed and memory depend on the number of sliding heads in a layer, not on which ones slide.
        """
        ends = [sliding * n // layers for n in range(layers + 1)]
        counts = (heads - (b - a) for a, b in pairwise(ends))
        return cls.of([[head < full for head in range(heads)] for full in counts], window)

    @classmethod
    def all_full(cls, num_layers: int, num_key_value_heads: int) -> HeadMask:
        """The original model: every head full."""
        return cls(((0,) * num_key_value_heads,) * num_layers)

    @classmethod
    def all_sliding(cls, num_layers: int, num_key_value_heads: int, window: Window) -> HeadMask:
        """Every head sliding."""
        return cls(((window.size,) * num_key_value_heads,) * num_layers, window.sinks)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and KV heads of a layer."""
        return len(self.windows), len(self.windows[0])

    @property
    def is_full(self) -> Any:
        """Whether each head is full, a new boolean array [L, HKV]."""
        import numpy as np  # not at the top: recipes are checked without it

        return np.array(self.windows) == 0

    @cached_property
    def menu(self) -> tuple[Window, ...]:
        """The windows of sliding heads, widest first."""
        sizes = {size for row in self.windows for size in row} - {0}
        return tuple(Window(size, self.sinks) for size in sorted(sizes, reverse=True))

    @cached_property
    def layers(self) -> list[dict[Window | None, int]]:
        """How many heads of each layer are full (None) and have each window, the widest first."""
        kinds: list[tuple[Window | None, int]] = [(None, 0)]
        kinds += [(window, window.size) for window in self.menu]
        return [{kind: row.count(size) for kind, size in kinds} for row in self.windows]

    @property
    def num_sliding(self) -> int:
        """Number of sliding KV heads in the whole model."""
        return sum(size > 0 for row in self.windows for size in row)

    @property
    def swa_ratio(self) -> float:
        """rho(z): share of sliding KV heads."""
        return self.num_sliding / (len(self.windows) * len(self.windows[0]))

    @property
    def head_order(self) -> list[list[int]]:
        """KV heads by layer, from full to the narrowest window, else in the base model's order."""
        return [sorted(range(len(r)), key=lambda head: -(r[head] or 2**31)) for r in self.windows]

    def kv_slots(self, tokens: int) -> int:
        """KV slots (heads x cached tokens) after `tokens` tokens."""
        return sum(
            count * (tokens if window is None else window.held(tokens))
            for row in self.layers
            for window, count in row.items()
        )

    @cached_property
    def key(self) -> str:
        """The mask as text: windows of a layer with commas, layers with slashes, then the sinks."""
        rows = "/".join(",".join(map(str, row)) for row in self.windows)
        return f"{rows}+{self.sinks}" if self.sinks else rows

    @property
    def content(self) -> dict[str, Any]:
        """`windows` and `sinks` as JSON: `hybrid_attention` of a configuration, part of files."""
        return {"windows": [list(row) for row in self.windows], "sinks": self.sinks}
