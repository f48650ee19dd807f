"""The combinations of a comparison, and what their stages published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bosch.search.methods import METHODS
from pipeline.run.runner import Runner
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, SuiteScores
from stages.report.charts import interval_of
from stages.search.stage import SearchSummary
from stages.train.stage import checkpoint_tokens

# Rows of BOSCH Tables 1 and 2, by the kind of method.
_GROUPS = {
    "Layer-level heuristics": ("layer rule",),
    "Head-level static methods": ("ranking",),
    "BOSCH and its ablations": ("search", "ablation"),
}
_OTHERS = "Not in the paper"

Models = Literal["original", "untrained", "trained"]


@dataclass(frozen=True)
class Combination:
    """One method at one ratio, and its search's seed; `own_seed`: it is the recipe's."""

    method: str
    ratio: float
    seed: int
    own_seed: bool

    @property
    def folder(self) -> str:
        """Name of the combination's folder of links."""
        return f"{self.method}-{self.ratio:g}" + ("" if self.own_seed else f"-seed-{self.seed}")

    @staticmethod
    def order(method: str) -> tuple[int, int]:
        """Place of a method in the tables."""
        return [*_GROUPS, _OTHERS].index(group_of(method)), list(METHODS).index(method)

    def __str__(self) -> str:
        seed = "" if self.own_seed else f", seed {self.seed}"
        return f"{label_of(self.method)} at {self.ratio:g}{seed}"


@dataclass(frozen=True)
class ScoreRow:
    """A score with the ends of its 95 % interval: of one task at one length (0: it has none).

    `task` is empty where it is a suite's average.
    """

    models: Models
    suite: str
    task: str
    length: int
    score: float
    low: float
    high: float

    @property
    def place(self) -> tuple[str, str, int]:
        """Which suite, task and length."""
        return self.suite, self.task, self.length


@dataclass(frozen=True)
class Result:
    """Results that the stages of a combination published; `missing`: what has no score, and why."""

    keys: Mapping[str, str]
    calibration_score: float
    calibration_log_likelihood: float
    costs: Mapping[str, float]
    notes: Sequence[str]
    rows: Sequence[ScoreRow]
    trained_tokens: int | None
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """All combinations of a comparison and the results there are so far.

    `failures` says why a combination has none. `paper` holds the published scores of untrained
    hybrids by ratio and method, where they compare.
    """

    recipe: str
    model: str
    folder: Path
    combinations: tuple[Combination, ...]
    with_training: bool
    results: Mapping[Combination, Result] = field(default_factory=dict)
    failures: Mapping[Combination, str] = field(default_factory=dict)
    paper: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return sorted({combination.ratio for combination in self.combinations})

    @property
    def methods(self) -> list[str]:
        """In the order of the tables."""
        return list(dict.fromkeys(combination.method for combination in self.combinations))

    def rows(
        self, models: Models, method: str | None = None, ratio: float | None = None
    ) -> list[tuple[Combination, ScoreRow]]:
        """Scores of all seeds of one method at one ratio, or of all of them."""
        return [
            (one, row)
            for one, result in self.results.items()
            if method in (None, one.method) and ratio in (None, one.ratio)
            for row in result.rows
            if row.models == models
        ]

    def results_of(self, method: str, ratio: float) -> list[Result]:
        """Results of all seeds of one method at one ratio."""
        return [
            result
            for one, result in self.results.items()
            if (one.method, one.ratio) == (method, ratio)
        ]

    def averages(self, models: Models, method: str, ratio: float, suite: str) -> list[ScoreRow]:
        """A suite's averages of all seeds of one method at one ratio."""
        return [row for _, row in self.rows(models, method, ratio) if row.place == (suite, "", 0)]

    @property
    def originals(self) -> dict[tuple[str, str, int], tuple[Combination, ScoreRow]]:
        """The original model's scores by place: the same in every combination."""
        scores: dict[tuple[str, str, int], tuple[Combination, ScoreRow]] = {}
        for one, row in self.rows("original"):
            scores.setdefault(row.place, (one, row))
        return scores

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.suite for _, row in self.rows("original")))

    @property
    def missing(self) -> list[str]:
        """Combinations, and tasks and models of others, without a score, and why."""
        return [
            *(f"{one} has no scores: {why}" for one, why in self.failures.items()),
            *(f"{one}: {why}" for one, result in self.results.items() for why in result.missing),
        ]


def label_of(method: str) -> str:
    """A method's name in the tables."""
    return METHODS[method].label


def group_of(method: str) -> str:
    """The group of rows that a method belongs to."""
    if not METHODS[method].in_paper:
        return _OTHERS
    return next(name for name, kinds in _GROUPS.items() if METHODS[method].kind in kinds)


def read_result(runner: Runner) -> Result:
    """Read what a combination's stages published; raises RunError if it cannot be read."""
    folders = {
        node.name: runner.store.published(node.name, str(node.key))
        for node in runner.nodes
        if node.name in runner.chosen
    }
    search = SearchSummary.read(folders["search"])
    scores = Scores.read(folders["evaluate"])
    trained = scores.last_trained
    names = ("evaluations", "full_forward_equivalents", "model_seconds", "solver_seconds")
    return Result(
        keys={name: folder.name for name, folder in folders.items()},
        calibration_score=search.best_score,
        calibration_log_likelihood=search.best_log_likelihood,
        costs={
            name: value
            for name, value in search.content.items()
            if name in names or name.startswith("reused_")
        },
        notes=search.notes,
        rows=[
            row
            for models, name in (
                ("original", ORIGINAL),
                ("untrained", HYBRID),
                ("trained", trained),
            )
            for row in _rows(models, scores.checkpoints.get(str(name), {}))
        ],
        trained_tokens=checkpoint_tokens(trained) if trained else None,
        missing=scores.missing_sentences(),
    )


def _rows(models: Any, suites: Mapping[str, SuiteScores]) -> Iterator[ScoreRow]:
    for suite, table in suites.items():
        yield ScoreRow(models, suite, "", 0, *interval_of(table))
        for task, by_length in table.tasks.items():
            for length, one in by_length.items():
                yield ScoreRow(models, suite, task, length, one.score, one.low, one.high)
