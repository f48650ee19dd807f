"""Base class of all suites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.progress import Progress
from data_prep.documents.calibration import CalibrationNeedles
from stages.evaluate.answers import AnswerFolder, EvaluatedModel, Subtask, TaskGroup
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.generation import Question, generate
from stages.evaluate.tables import SuiteAnswers

# Batches of answer records.
Records = Iterator[list[dict[str, Any]]]


@dataclass(kw_only=True)
class Suite(ABC):
    """A benchmark on one of `world` ranks, which takes every `world`-th sample.

    `missing` has the reason for each task without a score, `failed` for each model; `groups` are
    sets of tasks with a common score.
    """

    name: str
    section: Any
    tokenizer: Any
    answers: AnswerFolder
    rank: int
    world: int
    batch_size: int
    samples_folder: Path | None = None
    card: Path | None = None  # of the original model
    calibration: CalibrationNeedles | None = None
    positions: int | None = None  # of the models; None where they have no limit
    seed: int = 0
    chat: ChatTemplate | None = None
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    groups: dict[str, TaskGroup] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, Any]:
        """The texts from which samples are made, for reports."""
        return {}

    @property
    @abstractmethod
    def subtasks(self) -> list[Subtask]:
        """Every task and length that has samples, in the order in which they are run."""

    @abstractmethod
    def samples(self, subtask: Subtask) -> int:
        """How many samples the subtask has on all ranks."""

    @abstractmethod
    def prepare(self) -> None:
        """Make or read the samples."""

    @abstractmethod
    def answer(self, subtask: Subtask, indices: Sequence[int], loaded: Any) -> Records:
        """Records of the answers to the samples at `indices`."""

    def run(self, model: EvaluatedModel, loaded: Any, bar: Progress) -> None:
        """Answer this rank's unanswered samples and store each batch when it is finished."""
        for subtask in self.subtasks:
            if indices := self.unanswered(model, subtask):
                journal = self.answers.journal(model, subtask)
                for records in self.answer(subtask, indices, loaded):
                    journal.append(*records)
                    bar.update(len(records), note=self.note(subtask))

    def records(self, model: EvaluatedModel) -> Iterator[dict[str, Any]]:
        """The model's answers in the order of subtask and index, as lines of samples.jsonl.

        Raises RunError when answers are missing.
        """
        for subtask in self.subtasks:
            answers, count = self.answers.read(model, subtask), self.samples(subtask)
            absent = count - len(answers.keys() & set(range(count)))
            if absent:
                raise RunError(
                    f"{model.name}: {subtask.task} at {subtask.length} lacks {absent} of {count} "
                    "answers; run again to make up the rest"
                )
            common = {"checkpoint": model.name, "suite": self.name}
            place = {"task": subtask.task, "length": subtask.length}
            for index in range(count):
                yield {**common, **place, **answers[index]}

    def own_table(self, answers: SuiteAnswers, original: SuiteAnswers | None) -> Any:
        """A model's table if the suite measures something other than scores, else None."""
        return None

    def note(self, subtask: Subtask) -> str:
        """Text on the progress bar while a subtask is answered."""
        return f"{subtask.task} at {subtask.length:,}"

    def count_unanswered(self, model: EvaluatedModel) -> int:
        """How many samples of this rank the model has not answered."""
        return sum(len(self.unanswered(model, subtask)) for subtask in self.subtasks)

    def unanswered(self, model: EvaluatedModel, subtask: Subtask) -> list[int]:
        """This rank's samples of a subtask that have no answer, in ascending order."""
        answered = set(self.answers.read(model, subtask))
        own_indices = range(self.rank, self.samples(subtask), self.world)
        return [index for index in own_indices if index not in answered]

    def generated(
        self, loaded: Any, questions: Sequence[Question], new_tokens: int
    ) -> Iterator[list[tuple[Question, str]]]:
        """Questions with their outputs, a batch at a time."""
        return generate(loaded, self.tokenizer, questions, new_tokens, self.batch_size)


def answer_record(
    question: Question, score: float, answers: Sequence[str], output: str
) -> dict[str, Any]:
    """Record of one answer: index, score, expected answers, end of the prompt, output."""
    return {
        "index": question.index, "score": score, "answers": list(answers),
        "question": question.tail, "output": output,
    }  # fmt: skip
