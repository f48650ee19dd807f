"""Answers on disk: a journal for each model, task, length and rank, so that runs resume."""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.errors import RunError
from bosch.files import canonical_json, exists, names_in
from bosch.journal import Journal
from bosch.weight_files import code_files, weight_files
from stages.context import ModelConfig
from stages.published import Manifest

if TYPE_CHECKING:
    from lm_eval.config.group import AggMetricConfig

    from bosch.heads import HeadMaskFile

# Suffixes of files other than weights and code that models and tokenizers are read from.
_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
Answers = dict[int, dict[str, Any]]
_FILE_NAME = re.compile(r"\w[\w. :+-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate, as a hybrid under `mask` if one is given.

    `identity` names the model among shared answers; None: its answers are not shared.
    """

    name: str
    model: ModelConfig
    identity: str | None = None
    mask: HeadMaskFile | None = None


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
    or over the tasks. Without rules the score is the unweighted mean of the tasks' scores; each of
    `parts` is first averaged to one score. `is_named`: the recipe names the group itself.
    """

    tasks: tuple[str, ...]
    rules: tuple[AggMetricConfig, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    is_named: bool = False


class ModelError(RunError):
    """This model cannot be evaluated; the evaluation of other models continues."""


@dataclass(frozen=True)
class AnswerFolder:
    """The answers below a folder: writes those of one rank, reads those of all ranks.

    Answers of models with an identity are below `shared`, if given, and outlive the run; all others
    are below `folder`.
    """

    folder: Path
    shared: Path | None
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
        if self.shared is not None and model.identity is not None:
            return shared_answers(self.shared) / model.identity
        # A name may be any text, even a path.
        return self.folder / digest_of({"name": model.name, "identity": model.identity})


def _answer(line: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A sample's index and answer; raises KeyError or TypeError if the line lacks them."""
    operator.index(line["index"])
    for value in [line["score"]] if "score" in line else line["loss"]:
        math.isfinite(value)  # raises TypeError unless it is a number
    return line["index"], line


def shared_answers(shared: Path) -> Path:
    """The folder of the answers of models with an identity, below a shared folder."""
    return shared / "answers"


def digest_of(content: Mapping[str, Any]) -> str:
    """A short hash of `content`: everything that a subtask's answers depend on but the model."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


def content_identity(folder: Path, model: ModelConfig, sha256: Callable[[Path], str]) -> str:
    """Identity of the model in `folder` among shared answers: a hash of its files and its settings.

    `sha256` returns the content hash of a file.
    """
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in model_files(folder)}
    settings = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    return hashlib.sha256(canonical_json({"files": files, **settings}).encode()).hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The weights and all other files that a model or its tokenizer may be read from."""
    weights = {folder / name for name in weight_files(folder)}
    by_suffix = {path for path in folder.iterdir() if path.suffix in _SUFFIXES}
    code = {folder / name for name in code_files(folder)}
    return sorted(path for path in weights | by_suffix | code if path.is_file())


def published_identity(folder: Path, model: ModelConfig, stage: Path) -> str | None:
    """`content_identity` of a model in a stage's published output, from the hashes in its manifest.

    None if the stage ran outside the pipeline, without a manifest. Raises RunError when the
    manifest lacks a file of the model.
    """
    if not exists(stage / Manifest.FILE):
        return None
    hashes = Manifest.read(stage).hashes

    def sha256(path: Path) -> str:
        name = path.relative_to(stage).as_posix()
        if name not in hashes:
            raise RunError(f"{stage}: {name} is not in {Manifest.FILE}; run its stage again")
        return hashes[name]

    return content_identity(folder, model, sha256)


def _stem(subtask: Subtask) -> str:
    """A valid file name for any task name: users' files may name tasks."""
    task = subtask.task
    if not _FILE_NAME.fullmatch(task):
        task = digest_of({"task": task})
    return f"{task}-{subtask.length}-{subtask.digest}"
