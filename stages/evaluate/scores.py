"""Published files of an evaluation: scores.json and samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from stages.published import Record, WorkSummary
from stages.train.stage import checkpoint_tokens

# Key of `Scores.missing` for models without any score.
FAILED_MODELS = "models"
SAMPLES = "samples.jsonl"
# Characters of a prompt's end that are stored with its answer.
TAIL_CHARACTERS = 300
ORIGINAL = "original"
HYBRID = "hybrid"


def is_hybrid(name: str) -> bool:
    """Whether an evaluated model is the recipe's hybrid or one of its checkpoints."""
    return name == HYBRID or checkpoint_tokens(name) is not None


class PairedComparison(Record):
    """A model compared with the original on the same samples, in points, with 95 % intervals.

    `p_value` tests that both answer equally well.
    """

    samples: int
    difference: float
    difference_low: float
    difference_high: float
    p_value: float


class MeanScore(Record):
    """A score in points of 100 with its 95 % interval, and the comparison with the original.

    `cut` of its samples were truncated at the beginning. A group's is over those of its tasks (`of`
    is their number) that have a score.
    """

    score: float
    low: float
    high: float
    against_original: PairedComparison | None = None
    samples: int = 0
    cut: int = 0
    tasks: list[str] = Field(default=[])
    of: int = 0


class SuiteScores(Record):
    """Scores of one model in one suite, in points of 100; every other field is a task.

    `low` and `high` are the ends of the average's 95 % interval. `groups` holds the scores of
    lm-eval's groups.
    """

    __pydantic_extra__: dict[str, dict[int, MeanScore]]

    average: float
    low: float | None = None
    high: float | None = None
    against_original: PairedComparison | None = None
    by_length: dict[int, MeanScore] = Field(default={})
    groups: dict[str, MeanScore] = Field(default={})

    @property
    def tasks(self) -> dict[str, dict[int, MeanScore]]:
        """Scores by task and length (0: no length)."""
        return self.__pydantic_extra__

    @property
    def samples(self) -> int:
        return sum(score.samples for task in self.tasks.values() for score in task.values())


class BinLoss(Record):
    """Mean over documents in one bin of positions, with its 95 % interval, nats per token.

    Up to four documents have no interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None


class PositionLoss(Record):
    """Loss by position: bin i covers tokens `edges[i]` to `edges[i + 1]` (exclusive).

    `difference` is the difference to the original on the same documents.
    """

    edges: list[int]
    documents: int
    loss: list[BinLoss]
    difference: list[BinLoss] | None = None


SUITES = {"ruler": "RULER", "lm_eval": "Tasks of lm-eval", "positions": "Loss by position"}


def suite_title(name: str) -> str:
    """Display name of a suite; an unknown name is returned as it is."""
    return SUITES.get(name, name)


class Scores(WorkSummary):
    """scores.json: suites by evaluated model, and the source of the haystacks' text.

    `missing` has the reason for each task without a score, by suite, and under FAILED_MODELS the
    reason for each model without any. `prompts`: whether prompts use the tokenizer's chat template.
    """

    FILE = "scores.json"

    checkpoints: dict[str, dict[str, SuiteScores]]
    positions: dict[str, PositionLoss] = Field(default={})
    missing: dict[str, dict[str, str]] = Field(default={})
    corpus: dict[str, Any] | None = None
    prompts: str | None = None

    @property
    def failed_models(self) -> dict[str, str]:
        return self.missing.get(FAILED_MODELS, {})

    def notes(self) -> list[str]:
        """Remarks on missing scores and truncated prompts."""
        notes = [
            f"{suite}: {task} has no score: {reason}"
            for suite, tasks in self.missing.items()
            for task, reason in tasks.items()
        ]
        notes += [
            f"{suite}: of {task} {score.cut:,} of {score.samples:,} samples are longer than the "
            "model reads, and lost their beginning"
            for tables in self.checkpoints.values()
            for suite, table in tables.items()
            for task, by_length in table.tasks.items()
            for score in by_length.values()
            if score.cut
        ]
        return list(dict.fromkeys(notes))

    @property
    def averages(self) -> dict[str, dict[str, float]]:
        return {
            name: {suite: scores.average for suite, scores in suites.items()}
            for name, suites in self.checkpoints.items()
        }


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """The answers below a stage's folder: checkpoint, suite, task, length, index, score, output."""
    with (folder / SAMPLES).open(encoding="utf-8") as file:
        yield from map(json.loads, file)
