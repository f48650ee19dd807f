"""HELMET: its section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from stages.evaluate.prompts import DataFolder, PromptEvaluation
from stages.evaluate.suites.helmet.tasks import HELMET_TASKS, HelmetTaskName
from stages.fields import Count, different


def _published(lengths: list[int]) -> list[int]:
    known = [*HELMET_TASKS["json_kv"].counts]
    for length in lengths:
        if length not in known:
            raise ValueError(f"{length:,} is none of HELMET's lengths {known}")
    return lengths


class Helmet(PromptEvaluation):
    """HELMET: questions behind passages (RAG) and keys of a JSON object (arXiv:2410.02694)."""

    title = "HELMET"
    source = "arXiv:2410.02694"
    public_data = "princeton-nlp/HELMET"
    published = 1000
    new_tokens = 100

    data_dir: DataFolder = Field(
        description="HELMET's folder data, of which kilt/ and json_kv/ are read."
    )
    tasks: Annotated[list[HelmetTaskName], AfterValidator(different)] = Field(
        default=[*HELMET_TASKS], min_length=1, description="Tasks, by HELMET's names."
    )
    lengths: Annotated[list[Count], AfterValidator(different), AfterValidator(_published)] = Field(
        default=[8192, 16384, 32768],
        min_length=1,
        description="Tokens of a prompt and its answer; a longer prompt loses its last passages.",
    )
    samples: Count | None = Field(
        100, description="Questions of a task at each length, drawn by the seed; null: all."
    )

    @property
    def most_samples(self) -> int:
        questions = min(self.samples or self.published, self.published)
        return sum(questions * HELMET_TASKS[name].depths for name in self.tasks)

    def files(self, folder: Path) -> list[str]:
        return sorted(name for name in self._named() if (folder / name).is_file())

    def missing_files(self, folder: Path) -> Iterator[str]:
        """The files of the tasks and lengths."""
        for name in self._named():
            if not (folder / name).is_file():
                yield f"{folder} has no {name} of HELMET"

    def _named(self) -> list[str]:
        tasks = [HELMET_TASKS[name] for name in self.tasks]
        tests = {task.file.format(k=task.counts[n]) for task in tasks for n in self.lengths}
        return sorted(tests | {task.examples for task in tasks if task.examples is not None})


SUITE = Helmet
