"""A suite of prompts made from a user's files, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from bosch.files import file_digest
from data_prep.tasks.samples import TAIL_CHARACTERS, tokenizer_digest
from stages.evaluate.answers import Subtask, digest_of
from stages.evaluate.chat import Turns, prompt_of
from stages.evaluate.generation import Question
from stages.evaluate.prompts import PromptEvaluation
from stages.evaluate.suite import Records, Suite, answer_record


def joined(turns: Turns) -> str:
    return "\n\n".join(turn["content"] for turn in turns)


@dataclass(frozen=True)
class PromptSample:
    """A conversation to be answered; `plain` is its text for a model without a chat template.

    `turns` are made on demand. `score` maps an output to [0, 1]. Samples of one `document` count as
    one sample.
    """

    task: str
    length: int
    turns: Callable[[], Turns]
    answers: tuple[str, ...]
    new_tokens: int
    score: Callable[[str], float]
    plain: Callable[[Turns], str] = joined
    document: str | None = None


@dataclass(kw_only=True)
class PromptSuite(Suite):
    """A suite whose samples come from the files that its section names.

    All models get the same prompts, so they are tokenised once: 4 bytes a token in memory, 1 GB for
    7,540 prompts of 32k tokens on one rank.
    """

    section: PromptEvaluation
    _samples: dict[Subtask, list[PromptSample]] = field(default_factory=dict)
    _questions: dict[tuple[Subtask, int], Question] = field(default_factory=dict)

    @property
    def subtasks(self) -> list[Subtask]:
        return list(self._samples)

    def samples(self, subtask: Subtask) -> int:
        return len(self._samples[subtask])

    def document(self, subtask: Subtask, index: int) -> str | None:
        return self._samples[subtask][index].document

    def prepare(self) -> None:
        """Read the data; prompts are made later, on demand.

        A length without samples becomes `missing`. Raises UserError when the data cannot be read,
        or has no samples at all.
        """
        folder = Path(self.section.data_dir)
        files = {name: file_digest(folder / name) for name in self.section.files(folder)}
        digests: dict[tuple[str, int], str] = {}
        for sample in self.section.make(self.tokenizer, self.seed, self.chat):
            task, length = key = sample.task, sample.length
            if key not in digests:
                digests[key] = self._digest(task, length, files)
            self._samples.setdefault(Subtask(task, length, digests[key]), []).append(sample)
        lengths = {subtask.length for subtask in self._samples}
        for length in self.section.lengths:
            if length not in lengths:
                self.missing[f"{length:,} tokens"] = (
                    f"evaluate.{self.name}.lengths: {self.section.data_dir} has no sample of "
                    f"{length:,} tokens"
                )
        if not lengths:
            raise UserError("; ".join(self.missing.values()))

    def _digest(self, task: str, length: int, files: Mapping[str, str]) -> str:
        """Hash of everything that a task's samples at a length depend on."""
        only: dict[str, Any] = {"tasks": [task], "lengths": [length]}
        fields = type(self.section).model_fields
        section = self.section.model_copy(update={key: only[key] for key in only if key in fields})
        identity = {
            "version": section.version,
            "files": {name: files[name] for name in section.files(Path(section.data_dir))},
            "section": section.model_dump(mode="json", exclude={"data_dir", "lengths"}),
            "seed": self.seed,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "chat": self.chat.digest if self.chat is not None else None,
        }
        return digest_of(identity)

    def answer(self, subtask: Subtask, indices: Sequence[int], loaded: Any) -> Records:
        samples = self._samples[subtask]
        questions = [self._question(subtask, index) for index in indices]
        new_tokens = max(sample.new_tokens for sample in samples)
        for batch in self.generated(loaded, questions, new_tokens):
            answered = [(question, samples[question.index], output) for question, output in batch]
            yield [
                answer_record(q, s.score(output), s.answers, output) for q, s, output in answered
            ]

    def _question(self, subtask: Subtask, index: int) -> Question:
        key, sample = (subtask, index), self._samples[subtask][index]
        if key not in self._questions:
            text, ids = prompt_of(self.tokenizer, sample.turns(), self.chat, sample.plain)
            self._questions[key] = Question(
                index, np.asarray(ids, np.int32), [], text[-TAIL_CHARACTERS:],
                new_tokens=sample.new_tokens,
            )  # fmt: skip
        return self._questions[key]
