"""A suite's section of `evaluate` in a recipe, its checks and its cost; no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from stages.cost import BYTES
from stages.fields import Section
from stages.stage import LoadedRecipe


@dataclass(frozen=True)
class Work:
    """Samples, with their answers, of `length` tokens on average.

    `tokens` is the sum over all samples; `longest` is the longest sample with its answer,
    `most_rows` the largest batch. Logits are computed at `logits` tokens, where answers are
    generated; None: at all tokens. A pass reads at most `chunk` tokens of a sample, unless
    processes share it. With `float32_losses` the softmax of logits is in float32.
    """

    samples: int
    tokens: int
    length: int
    longest: int
    most_rows: int = sys.maxsize
    logits: int | None = None
    chunk: int = sys.maxsize
    float32_losses: bool = False

    def logit_bytes(self, rows: int, vocabulary: int, value_bytes: int) -> int:
        """Peak bytes of the logits at all tokens of a pass over `rows` samples; 0 with answers.

        Logits and their log-softmax, which in float32 needs a copy of logits in half precision.
        """
        if self.logits is not None:
            return 0
        copies = 2 * value_bytes
        if self.float32_losses and value_bytes < BYTES["float32"]:
            copies = value_bytes + 2 * BYTES["float32"]
        return min(rows, self.most_rows) * min(self.longest, self.chunk) * vocabulary * copies


class SuiteSection(Section):
    """A suite's section of a recipe.

    `title` is its display name, `runner` its `Suite` as `module:class`. Suites are run and shown by
    `rank`, then by name. A suite that is `by_default` runs with its defaults if the recipe does not
    name it.
    """

    title: ClassVar[str]
    runner: ClassVar[str]
    rank: ClassVar[int] = 3
    by_default: ClassVar[bool] = False

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Conflicts between the section's fields: messages that begin with `where`."""
        yield from ()

    def chat_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Fields that leave no room for the tokens of a chat template, as in `faults`."""
        yield from ()

    def slow_faults(self, where: str) -> Iterator[str]:
        """Faults that only `validate` looks for, as in `faults`."""
        yield from ()

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Missing packages and files other than the named inputs, as in `faults`."""
        yield from ()

    def work(self) -> tuple[list[Work], list[str]]:
        """The samples that are known in advance, and remarks for `plan`."""
        return [], []
