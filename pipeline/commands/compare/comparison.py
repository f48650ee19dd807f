"""The combinations of a comparison, and what their stages published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bosch.search.methods import METHODS
from pipeline.run.runner import Runner
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, SuiteScores
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
class Score:
    """Average of a suite in points of 100."""

    average: float
    standard_error: float | None


@dataclass(frozen=True)
class TaskRow:
    """Score of one task at one length (0: it has none) with the ends of its 95 % interval."""

    models: Models
    suite: str
    task: str
    length: int
    score: float
    low: float
    high: float

    @property
    def place(self) -> tuple[Models, str, str, int]:
        """Which models, suite, task and length."""
        return self.models, self.suite, self.task, self.length


@dataclass(frozen=True)
class Result:
    """Results that the stages of a combination published; `missing`: what has no score, and why."""

    keys: Mapping[str, str]
    calibration_score: float
    calibration_log_likelihood: float
    costs: Mapping[str, float]
    notes: Sequence[str]
    original: Mapping[str, Score]
    untrained: Mapping[str, Score]
    trained: Mapping[str, Score]
    tasks: Sequence[TaskRow]
    trained_tokens: int | None
    original_tasks: Sequence[TaskRow] = ()
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

    def values(self, method: str, ratio: float, models: Models, suite: str) -> list[float]:
        """Averages of all seeds of one method at one ratio."""
        scores: list[Mapping[str, Score]] = [
            getattr(result, models) for result in self.results_of(method, ratio)
        ]
        return [suites[suite].average for suites in scores if suite in suites]

    def results_of(self, method: str, ratio: float) -> list[Result]:
        """Results of all seeds of one method at one ratio."""
        return [
            result
            for combination, result in self.results.items()
            if (combination.method, combination.ratio) == (method, ratio)
        ]

    def task_rows(
        self, method: str, ratio: float, place: tuple[Models, str, str, int]
    ) -> list[tuple[Combination, TaskRow]]:
        """Scores of all seeds of one method at one ratio in (models, suite, task, length)."""
        return [
            (combination, row)
            for combination, result in self.results.items()
            if (combination.method, combination.ratio) == (method, ratio)
            for row in result.tasks
            if row.place == place
        ]

    @property
    def missing(self) -> list[str]:
        """Combinations, and tasks and models of others, without a score, and why."""
        return [
            *(f"{one} has no scores: {why}" for one, why in self.failures.items()),
            *(f"{one}: {why}" for one, result in self.results.items() for why in result.missing),
        ]

    @property
    def originals(self) -> Mapping[str, Score]:
        """The original model's scores: the same in every combination."""
        return next((result.original for result in self.results.values()), {})


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
    models = {name: _suites(suites) for name, suites in scores.checkpoints.items()}
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
        original=models[ORIGINAL],
        untrained=models[HYBRID],
        trained=models[trained] if trained else {},
        tasks=[
            *_task_rows("untrained", scores.checkpoints[HYBRID]),
            *(_task_rows("trained", scores.checkpoints[trained]) if trained else ()),
        ],
        trained_tokens=checkpoint_tokens(trained) if trained else None,
        original_tasks=list(_task_rows("original", scores.checkpoints[ORIGINAL])),
        missing=scores.missing_sentences(),
    )


def _task_rows(models: Models, suites: Mapping[str, SuiteScores]) -> Iterator[TaskRow]:
    for suite, table in suites.items():
        for task, by_length in table.tasks.items():
            for length, one in by_length.items():
                yield TaskRow(models, suite, task, length, one.score, one.low, one.high)


def _suites(suites: Mapping[str, SuiteScores]) -> dict[str, Score]:
    return {name: Score(scores.average, scores.standard_error) for name, scores in suites.items()}
