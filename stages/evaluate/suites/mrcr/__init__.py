"""Section of the suite MRCR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from stages.evaluate.prompts import DataFolder, PromptEvaluation
from stages.fields import Count, different


class Mrcr(PromptEvaluation):
    """OpenAI's MRCR: the i-th of 2, 4 or 8 answers to equal requests (arXiv:2409.12640)."""

    title = "MRCR"
    public_data = "openai/mrcr"
    suffixes = (".parquet", ".jsonl")
    published = 100
    kinds = 3
    new_tokens = 600

    data_dir: DataFolder
    """Folder with the Parquet files of openai/mrcr, or JSONL of the same fields."""
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[8192, 16384, 32768], min_length=1
    )
    """Maximum tokens of a conversation with its answer; each sample has more than half of it."""
    samples: Count | None = None
    """First samples for each length and number of needles; default: all."""

    def missing_files(self, folder: Path) -> Iterator[str]:
        if not self.files(folder):
            yield f"{folder} has no Parquet or JSONL file of openai/mrcr"


SUITE = Mrcr
