"""From answers to scores.json and samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from data_prep.scoring import mean_and_error
from stages.configs import NeedleEvaluation
from stages.evaluating.needle_suite import Cell, cells_of, read_answers


def needle_scores(folder: Path, checkpoint: str, section: NeedleEvaluation) -> dict[str, Any]:
    """The checkpoint's table: task by length, averages over tasks and over everything, in percent.

    `average` is the unweighted mean over the cells; its standard error takes cells as independent.

    Raises:
        RunError: answers are missing.
    """
    table: dict[str, Any] = {task: {} for task in section.tasks}
    for cell in cells_of(section):
        answers = read_answers(folder, checkpoint, cell)
        if len(answers) != section.samples:
            raise RunError(
                f"{checkpoint}: {cell.task} at {cell.length} has {len(answers)} of "
                f"{section.samples} answers; run again to make up the rest"
            )
        score, error = mean_and_error([answers[index]["score"] for index in sorted(answers)])
        table[cell.task][str(cell.length)] = {
            "score": score,
            "standard_error": error,
            "samples": len(answers),
        }
    by_length = {
        str(length): _mean([table[task][str(length)]["score"] for task in section.tasks])
        for length in section.lengths
    }
    cells = [table[cell.task][str(cell.length)] for cell in cells_of(section)]
    error = sum(cell["standard_error"] ** 2 for cell in cells) ** 0.5 / len(cells)
    average = _mean([cell["score"] for cell in cells])
    return {"average": average, "standard_error": error, **table, "by_length": by_length}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_samples(
    path: Path, folder: Path, checkpoints: Sequence[str], section: NeedleEvaluation
) -> None:
    """All answers as JSONL, in the order of checkpoint, length, task, index."""
    with path.open("w", encoding="utf-8") as file:
        for record in _records(folder, checkpoints, section):
            file.write(json.dumps(record) + "\n")


def _records(
    folder: Path, checkpoints: Sequence[str], section: NeedleEvaluation
) -> Iterator[Mapping[str, Any]]:
    for checkpoint in checkpoints:
        for cell in cells_of(section):
            answers = read_answers(folder, checkpoint, cell)
            for index in sorted(answers):
                yield _record(checkpoint, cell, answers[index])


def _record(checkpoint: str, cell: Cell, answer: Mapping[str, Any]) -> dict[str, Any]:
    head = {"checkpoint": checkpoint, "suite": "needle", "task": cell.task, "length": cell.length}
    return {**head, **answer}
