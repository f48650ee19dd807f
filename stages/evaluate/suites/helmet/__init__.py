"""HELMET: its tasks with their files, and its section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from stages.evaluate.prompts import DataFolder, PromptEvaluation
from stages.fields import Count, different

HelmetTaskName = Literal["kilt_nq", "kilt_triviaqa", "kilt_hotpotqa", "kilt_popqa_3", "json_kv"]


class HelmetTask(NamedTuple):
    """A task of HELMET (arXiv:2410.02694) and its files.

    `{k}` in a file's name is the number of passages or pairs; `counts` has it by the approximate
    tokens of a prompt. An answer has at most `new_tokens`. `most_popular`: only entities with log10
    of page views below this. Each drawn question is used with the right passage at each of `depths`
    places.
    """

    file: str
    examples: str | None
    counts: Mapping[int, int]
    new_tokens: int
    ending: str
    depths: int = 1
    most_popular: float | None = None


_PASSAGES = {8192: 50, 16384: 105, 32768: 220, 65536: 440, 131072: 1000}
_PAIRS = {8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}


def _rag(test: str, train: str, depths: int, most_popular: float | None = None) -> HelmetTask:
    return HelmetTask(
        f"kilt/{test}_1000_k{{k}}_dep{depths}.jsonl",
        f"kilt/{train}_1000_k3_dep{depths}.jsonl",
        _PASSAGES, 20, "\nAnswer:", depths, most_popular,
    )  # fmt: skip


HELMET_TASKS: dict[HelmetTaskName, HelmetTask] = {
    "kilt_nq": _rag("nq-dev-multikilt", "nq-train-multikilt", 6),
    "kilt_triviaqa": _rag("triviaqa-dev-multikilt", "triviaqa-train-multikilt", 6),
    "kilt_hotpotqa": _rag("hotpotqa-dev-multikilt", "hotpotqa-train-multikilt", 3),
    "kilt_popqa_3": _rag("popqa_test", "popqa_test", 6, 3.0),
    "json_kv": HelmetTask("json_kv/test_k{k}_dep6.jsonl", None, _PAIRS, 100,
                    "\nCorresponding value:"),
}  # fmt: skip


def _published(lengths: list[int]) -> list[int]:
    choices = [*HELMET_TASKS["json_kv"].counts]
    for length in lengths:
        if length not in choices:
            raise ValueError(f"{length:,} is none of HELMET's lengths {choices}")
    return lengths


class Helmet(PromptEvaluation):
    """HELMET: questions behind passages (RAG) and keys of a JSON object (arXiv:2410.02694)."""

    title = "HELMET"
    public_data = "princeton-nlp/HELMET"
    published = 1000
    version = 6

    data_dir: DataFolder
    """HELMET's folder data, of which kilt/ and json_kv/ are read."""
    tasks: Annotated[list[HelmetTaskName], AfterValidator(different)] = Field(
        default=[*HELMET_TASKS], min_length=1
    )
    """Tasks, by HELMET's names."""
    lengths: Annotated[list[Count], AfterValidator(different), AfterValidator(_published)] = Field(
        default=[8192, 16384, 32768], min_length=1
    )
    """Tokens of a prompt and its answer; a longer prompt loses its last passages."""
    samples: Count | None = 100
    """Questions of a task at each length, drawn by the seed; null: all."""

    @property
    def most_samples(self) -> int:
        return sum(self._by_task.values())

    @property
    def generated(self) -> int:
        return sum(n * HELMET_TASKS[name].new_tokens for name, n in self._by_task.items())

    @property
    def _by_task(self) -> dict[HelmetTaskName, int]:
        """Samples of each task at a length."""
        questions = min(self.samples or self.published, self.published)
        return {name: questions * HELMET_TASKS[name].depths for name in self.tasks}

    def files(self, folder: Path) -> list[str]:
        return sorted(name for name in self._file_names() if (folder / name).is_file())

    def missing_files(self, folder: Path) -> Iterator[str]:
        for name in self._file_names():
            if not (folder / name).is_file():
                yield f"{folder} has no {name} of HELMET"

    def _file_names(self) -> list[str]:
        tasks = [HELMET_TASKS[name] for name in self.tasks]
        tests = {task.file.format(k=task.counts[n]) for task in tasks for n in self.lengths}
        return sorted(tests | {task.examples for task in tasks if task.examples is not None})


SUITE = Helmet
