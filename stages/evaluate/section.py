"""A suite's section of `evaluate` in a recipe, its checks and its cost; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from stages.faults import Fault
from stages.fields import Section
from stages.stage import LoadedRecipe


@dataclass(frozen=True)
class Work:
    """Samples of `length` tokens with their answers, in batches of at most `most_rows`.

    Logits are computed at `logits` tokens, where answers are generated; None: at all tokens.
    """

    samples: int
    length: int
    most_rows: int
    logits: int | None = None


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

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        """Conflicts between the section's fields, at dotted paths below `where`."""
        yield from ()

    def chat_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        """Fields that leave no room for the tokens of a chat template, as in `faults`."""
        yield from ()

    def slow_faults(self, where: str) -> Iterator[Fault]:
        """Faults that only `validate` looks for, as in `faults`."""
        yield from ()

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        """Missing packages and files other than the named inputs, as in `faults`."""
        yield from ()

    def work(self) -> list[Work]:
        """The samples that are known in advance, for `plan`."""
        return []
