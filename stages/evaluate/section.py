"""What a suite is to a recipe: its section of `evaluate`, its checks and its cost; no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from stages.fields import Section
from stages.recipe import LoadedRecipe


@dataclass(frozen=True)
class Work:
    """So many samples, answers counted, of a context of `length` tokens on average.

    `tokens` are those of all samples; `longest` is the longest of them, with its answer, and
    `most_rows` how many are read at once, at most.
    """

    samples: int
    tokens: int
    length: int
    longest: int
    most_rows: int = sys.maxsize


class SuiteSection(Section):
    """A suite's section of a recipe.

    `title` names it for people, `runner` is its `Suite` as `module:class`. Suites are asked and
    shown by `rank`, then by name. One that is `by_default` is asked with its defaults where a
    recipe does not name it. One that `reads_alone` cannot split a prompt over processes.
    """

    title: ClassVar[str]
    runner: ClassVar[str]
    rank: ClassVar[int] = 3
    by_default: ClassVar[bool] = False
    reads_alone: ClassVar[bool] = False

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """What is wrong between its fields, a message each that begins with `where`."""
        yield from ()

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """What a run needs beside the inputs that it names and that is not there, as `faults`."""
        yield from ()

    def card(self, loaded: LoadedRecipe) -> dict[str, Any]:
        """What its scores depend on in the model's card."""
        return {}

    def work(self) -> tuple[list[Work], list[str]]:
        """Its samples, as far as they are known, and what `plan` says of them."""
        return [], []
