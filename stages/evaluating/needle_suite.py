"""The needle suite on one rank: its samples, made once, and its answers, kept in files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bosch.progress import Progress
from data_prep.calibration import CalibrationNeedles
from data_prep.haystacks import make_sample
from data_prep.needles import encode_prompt
from data_prep.scoring import string_match_all
from stages.configs import NeedleEvaluation
from stages.evaluating.generation import Question, generate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One task at one length."""

    task: str
    length: int


def cells_of(section: NeedleEvaluation) -> list[Cell]:
    """All cells in the order in which they are run."""
    return [Cell(task, length) for length in section.lengths for task in section.tasks]


@dataclass
class NeedleSuite:
    """Samples and answers of one of `world` ranks, which takes every `world`-th sample."""

    section: NeedleEvaluation
    seed: int
    tokenizer: Any
    essay_words: list[str]
    calibration: CalibrationNeedles
    folder: Path
    rank: int
    world: int
    batch_size: int
    _questions: dict[Cell, list[Question]] = field(default_factory=dict)

    @property
    def samples_per_checkpoint(self) -> int:
        """Samples this rank answers for each checkpoint."""
        return len(self._indices()) * len(cells_of(self.section))

    def answered(self, checkpoint: str) -> int:
        """How many of them are in the files already."""
        return sum(
            len(done.keys() & set(self._indices()))
            for cell in cells_of(self.section)
            for done in [read_answers(self.folder, checkpoint, cell)]
        )

    def run(self, checkpoint: str, model: Any, bar: Progress) -> None:
        """Answer what is not yet answered; every finished batch is on disk at once."""
        for cell in cells_of(self.section):
            done = read_answers(self.folder, checkpoint, cell)
            left = [q for q in self._cell_questions(cell) if q.index not in done]
            if not left:
                continue
            path = answers_file(self.folder, checkpoint, cell, f"rank{self.rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_line(path)
            with path.open("a", encoding="utf-8") as file:
                self._answer(cell, left, model, file, bar)

    def _answer(
        self, cell: Cell, questions: list[Question], model: Any, file: Any, bar: Progress
    ) -> None:
        new_tokens = self.section.max_new_tokens
        for batch in generate(model, self.tokenizer, questions, new_tokens, self.batch_size):
            for question, output in batch:
                score = string_match_all(output, question.answers)
                record = {"index": question.index, "score": score, "answers": question.answers}
                file.write(json.dumps({**record, "output": output}) + "\n")
            file.flush()
            bar.update(len(batch), note=f"{cell.task} at {cell.length:,}")

    def _indices(self) -> range:
        return range(self.rank, self.section.samples, self.world)

    def _cell_questions(self, cell: Cell) -> list[Question]:
        """The cell's samples of this rank; kept, because every checkpoint is asked the same."""
        if cell not in self._questions:
            self._questions[cell] = [self._question(cell, index) for index in self._indices()]
        return self._questions[cell]

    def _question(self, cell: Cell, index: int) -> Question:
        sample = make_sample(
            cell.task, cell.length, self.tokenizer, "evaluation", self.seed, index,
            self.section.max_new_tokens, self.essay_words,
        )  # fmt: skip
        self.calibration.check([sample])
        ids = encode_prompt(self.tokenizer, sample.generation_prompt)
        return Question(index, np.asarray(ids, np.int32), sample.answers)


def answers_file(folder: Path, checkpoint: str, cell: Cell, writer: str) -> Path:
    """The file of one writer's answers."""
    return folder / checkpoint / f"{cell.task}-{cell.length}.{writer}.jsonl"


def _end_line(path: Path) -> None:
    """Close a line that a killed run left unfinished, so that what follows can be read."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def read_answers(folder: Path, checkpoint: str, cell: Cell) -> dict[int, dict[str, Any]]:
    """Answers of all writers by sample index; a line that is not whole counts as not there."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((folder / checkpoint).glob(f"{cell.task}-{cell.length}.*.jsonl")):
        for record in _whole_lines(path):
            found.setdefault(record["index"], record)
    return found


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"index", "score", "output", "answers"} <= record.keys():
            yield record
