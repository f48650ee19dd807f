"""Attention problems that hypothesis draws around every edge case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from hypothesis import strategies as st

from bosch.hybrid import AttentionContext, HeadLayout
from bosch.window import Window

# With one window, and with several in any order.
WIDTHS = [(1,), (1,), (1, 3), (2, 1, 5)]


def full_first(full: int, heads: int, window: Window) -> HeadLayout:
    """`heads` KV heads of which the first `full` are full."""
    return HeadLayout.of([0] * full + [window.size] * (heads - full), window.sinks)


def layout_of(windows: Sequence[Window | None]) -> HeadLayout:
    """KV heads with these windows, None for full ones."""
    sinks = max((window.sinks for window in windows if window), default=0)
    return HeadLayout.of([window.size if window else 0 for window in windows], sinks)


def by_rows(is_full: Sequence[bool], window: Window) -> HeadLayout:
    """KV heads in any order, full or with one window."""
    return HeadLayout.of([0 if full else window.size for full in is_full], window.sinks)


@dataclass(frozen=True)
class Case:
    """One attention problem; `past` tokens precede the queries.

    The sliding heads among `rows` have windows of `window` times each of `widths`, in turn.
    """

    length: int
    window: int
    sinks: int
    rows: tuple[bool, ...]
    q_per_kv: int = 2
    batch: int = 1
    past: int = 0
    padding: str = "none"
    seed: int = 0
    widths: tuple[int, ...] = (1,)

    def context(self) -> AttentionContext:
        total = self.past + self.length
        generator = torch.Generator().manual_seed(self.seed)
        valid = document = None
        if self.padding in ("left", "right", "holes"):
            valid = torch.ones(self.batch, total, dtype=torch.bool)
            for row in range(self.batch):
                pad = int(torch.randint(0, total, (1,), generator=generator))
                if self.padding == "left":
                    valid[row, :pad] = False
                elif self.padding == "right":
                    valid[row, total - pad :] = False
                else:
                    valid[row] = torch.rand(total, generator=generator) < 0.7
        if self.padding == "documents":
            borders = torch.rand(self.batch, total, generator=generator) < 4 / total
            document = borders.long().cumsum(-1)
        return AttentionContext(self.length, self.past, valid, document)

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        torch.manual_seed(self.seed)
        heads, total = len(self.rows), self.past + self.length
        shapes = [(heads * self.q_per_kv, self.length), (heads, total), (heads, total)]
        options = {"dtype": dtype, "requires_grad": True}
        return [torch.randn(self.batch, *shape, 4, **options) for shape in shapes]

    def windows(self) -> list[Window | None]:
        """The window of each head, None for a full one."""
        sizes = cycle(width * self.window for width in self.widths)
        return [None if full else Window(next(sizes), self.sinks) for full in self.rows]

    def layout(self) -> HeadLayout:
        return layout_of(self.windows())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shapes at every edge: T below, at and above W, W not dividing T, whole and partial blocks."""
    window = draw(st.sampled_from([1, 2, 3, 7, 16, 19, 32]))
    near = st.sampled_from([window - 1, window, window + 1, 2 * window, 5 * window + 3])
    length = max(1, draw(near | st.integers(1, 120)))
    padding = draw(st.sampled_from(["none", "none", "left", "right", "holes", "documents"]))
    past = 0 if padding == "documents" else draw(st.sampled_from([0, 0, 1, window, 41]))
    return Case(
        length,
        window,
        draw(st.sampled_from([0, 1, 4])),
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=5))),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2])),
        past,
        padding,
        draw(st.integers(0, 9)),
        draw(st.sampled_from(WIDTHS)),
    )
