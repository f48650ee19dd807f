"""Answers on disk: a journal for each model, task, length and writer, so that runs resume."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bosch.files import canonical_json
from bosch.heads import HeadMaskFile
from bosch.journal import Journal
from bosch.progress import Progress
from stages.configs import ModelConfig

_KEY = re.compile("[0-9a-f]{64}")
Answers = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Evaluated:
    """A model to evaluate, as a hybrid under `mask` where there is one.

    `identity` names it in what runs share; None: it is this run's alone.
    """

    name: str
    model: ModelConfig
    identity: str | None = None
    mask: HeadMaskFile | None = None


@dataclass(frozen=True)
class Subtask:
    """One task at one length (0: it has none) of samples that `digest` tells from others."""

    task: str
    length: int
    digest: str = ""


class Suite(Protocol):
    """A benchmark on one rank: which samples are open, their answers, and what it could not do."""

    name: str
    missing: dict[str, str]
    groups: dict[str, list[str]]

    @property
    def subtasks(self) -> list[Subtask]:
        """Every task and length that has samples."""

    def samples(self, subtask: Subtask) -> int:
        """How many samples the subtask has on all ranks."""

    def prepare(self) -> None:
        """Make or read what is asked, as far as this rank does it."""

    def open_samples(self, model: Evaluated) -> int:
        """Samples of this rank that the model has not answered."""

    def run(self, model: Evaluated, loaded: Any, bar: Progress) -> None:
        """Answer them; every finished batch is on disk at once."""


@dataclass(frozen=True)
class AnswerFolder:
    """The answers below a folder, written by one rank, read of all.

    Answers of models with an identity lie in `shared`, where there is one, and outlive the run.
    """

    own: Path
    shared: Path | None
    rank: int

    def journal(self, model: Evaluated, subtask: Subtask) -> Journal:
        """Where this rank appends."""
        return Journal(self._folder(model) / f"{_stem(subtask)}.rank{self.rank}.jsonl")

    def read(self, model: Evaluated, subtask: Subtask) -> Answers:
        """Answers by sample index; a question whose line is torn or damaged has none."""
        answers: Answers = {}
        for path in sorted(self._folder(model).glob(f"{_stem(subtask)}.*.jsonl")):
            for record in Journal(path).read_new():
                answers.setdefault(record["index"], record)
        return answers

    def _folder(self, model: Evaluated) -> Path:
        if self.shared is not None and model.identity is not None:
            return self.shared / model.identity
        return self.own / model.name


def digest_of(content: Mapping[str, Any]) -> str:
    """A short name of all that a subtask's answers depend on beside the model."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


def stored_identity(folder: Path) -> str | None:
    """What names a model that a stage made in what runs share; None for one outside the store.

    The key of the stage, the folder's name, and when it was written: a forced run writes again.
    """
    key = next((parent.name for parent in folder.parents if _KEY.fullmatch(parent.name)), None)
    if key is None:
        return None
    return f"{key}-{folder.name}-{(folder / 'config.json').stat().st_mtime_ns}"


def _stem(subtask: Subtask) -> str:
    return f"{subtask.task}-{subtask.length}-{subtask.digest}"
