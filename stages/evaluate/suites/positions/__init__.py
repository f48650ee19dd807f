"""Loss by position: its section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from pydantic import Field

from stages.evaluate.section import SuiteSection, Work
from stages.fields import Count, PathText
from stages.formats import counted
from stages.inputs import prose
from stages.stage import LoadedRecipe, position_faults
from stages.versions import installed_versions

# Tokens of one forward pass; their logits over the vocabulary are held at once.
CHUNK = 1024


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

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        yield from position_faults(loaded, f"{where}.length", self.length)

    def work(self) -> tuple[list[Work], list[str]]:
        tokens = self.documents * self.length
        documents = counted(self.documents, "document")
        fact = f"loss by position: {documents} of {self.length:,} tokens"
        work = Work(
            self.documents, tokens, self.length, self.length,
            most_rows=1, chunk=CHUNK, float32_losses=True,
        )  # fmt: skip
        return [work], [fact]


SUITE = PositionEvaluation
