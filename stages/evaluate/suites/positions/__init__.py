"""Loss by position: its section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from pydantic import Field

from stages.evaluate.section import SuiteSection, Work
from stages.faults import Fault
from stages.fields import Count, PathText
from stages.inputs import prose
from stages.stage import LoadedRecipe, position_faults
from stages.versions import installed_versions


class PositionEvaluation(SuiteSection):
    """Loss by position in held-out long documents."""

    title = "Loss by position"
    runner = "stages.evaluate.suites.positions.suite:PositionSuite"
    rank = 2

    length: Count = Field(32768, ge=2)
    """Tokens read of each document."""
    documents: Count = 32
    """Number of documents; the first that are long enough are used."""
    path: Annotated[PathText | None, prose(partial(installed_versions, ["transformers"]))] = None
    """Folder of .txt or .md files that are no training data; default: the source files of
    transformers' models from their first class on, the longest first."""

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        yield from position_faults(loaded, f"{where}.length", self.length)

    def work(self) -> list[Work]:
        return [Work(self.documents, self.length, most_rows=1)]


SUITE = PositionEvaluation
