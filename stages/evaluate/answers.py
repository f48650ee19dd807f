"""Answers on disk: a journal for each model, task, length and rank, so that runs resume."""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.errors import RunError
from bosch.files import canonical_json, names_in
from bosch.journal import Journal
from stages.context import ModelConfig

if TYPE_CHECKING:
    from lm_eval.config.group import AggMetricConfig

Answers = dict[int, dict[str, Any]]
_FILE_NAME = re.compile(r"\w[\w. :+-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate.

    Answers of an unfinished evaluation are used again only for a model with the same `identity`.
    """

    name: str
    model: ModelConfig
    identity: str | None = None


@dataclass(frozen=True)
class Subtask:
    """One task at one length (0: no length); `digest` identifies its samples."""

    task: str
    length: int
    digest: str = ""


@dataclass(frozen=True)
class TaskGroup:
    """Tasks with a common score, that of the first of the `rules`.

    `tasks` are all tasks, with and without answers. A rule of lm-eval has a metric, its filters
    (None: all that the tasks have), and whether the mean is over all documents (`weight_by_size`)
    or over the tasks. `is_named`: the recipe names the group itself.
    """

    tasks: tuple[str, ...]
    rules: tuple[AggMetricConfig, ...]
    is_named: bool = False


class ModelError(RunError):
    """This model cannot be evaluated; the evaluation of other models continues."""


@dataclass(frozen=True)
class AnswerFolder:
    """The answers below a folder: writes those of one rank, reads those of all ranks."""

    folder: Path
    rank: int

    def journal(self, model: EvaluatedModel, subtask: Subtask) -> Journal:
        """The file to which this rank appends."""
        return Journal(self._folder(model) / f"{_stem(subtask)}.rank{self.rank}.jsonl")

    def read(self, model: EvaluatedModel, subtask: Subtask) -> Answers:
        """Answers by sample index; truncated and damaged lines are left out."""
        answers: Answers = {}
        folder, stem = self._folder(model), f"{_stem(subtask)}.rank"
        for name in names_in(folder):
            if name.startswith(stem) and name.endswith(".jsonl"):
                for index, record in Journal(folder / name).read_new(_answer):
                    answers.setdefault(index, record)
        return answers

    def _folder(self, model: EvaluatedModel) -> Path:
        # A name may be any text, even a path.
        return self.folder / digest_of({"name": model.name, "identity": model.identity})


def _answer(line: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A sample's index and answer; raises KeyError or TypeError if the line lacks them."""
    operator.index(line["index"])
    for value in [line["score"]] if "score" in line else line["loss"]:
        math.isfinite(value)  # raises TypeError unless it is a number
    return line["index"], line


def digest_of(content: Mapping[str, Any]) -> str:
    """A short hash of `content`: everything that a subtask's answers depend on but the model."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


def _stem(subtask: Subtask) -> str:
    """A valid file name for any task name: users' files may name tasks."""
    task = subtask.task
    if not _FILE_NAME.fullmatch(task):
        task = digest_of({"task": task})
    return f"{task}-{subtask.length}-{subtask.digest}"
