"""The combinations of a comparison, with their published results."""

from __future__ import annotations

import functools
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bosch.analysis import intervals
from bosch.search.methods import METHODS
from bosch.vllm.plan import LARGE_GPU
from pipeline.run.runner import Runner
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, read_samples
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.tables import SuiteAnswers
from stages.materialize.stage import MaterializeSummary
from stages.report.charts import interval_of
from stages.report.results import Search, cache_size, served_bytes
from stages.search.stage import SearchConfig
from stages.stage import Recipe
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
    """A method at a ratio with a seed of the search; `own_seed`: it is the recipe's seed."""

    method: str
    ratio: float
    seed: int
    own_seed: bool

    @property
    def folder(self) -> str:
        return f"{self.method}-{self.ratio:g}" + ("" if self.own_seed else f"-seed-{self.seed}")

    @staticmethod
    def order(method: str) -> tuple[int, int]:
        return [*_GROUPS, _OTHERS].index(group_of(method)), list(METHODS).index(method)

    def __str__(self) -> str:
        seed = "" if self.own_seed else f", seed {self.seed}"
        return f"{METHODS[self.method].label} at {self.ratio:g}{seed}"


@dataclass(frozen=True)
class ScoreRow:
    """A score of a task at a length (0: it has none), with the ends of its 95 % interval.

    `task` is empty for a suite's average.
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
        return self.suite, self.task, self.length


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Scores in [0, 1] of the samples of a suite, by task and length in `places`.

    `weights` of a subtask's samples have a mean of 1: a document may have several samples.
    """

    places: tuple[tuple[str, int], ...]
    counts: tuple[int, ...]
    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    @classmethod
    def of(cls, subtasks: Mapping[tuple[str, int], Sequence[float]]) -> SampleScores:
        """Make the scores from lists by task and length."""
        lists = list(subtasks.values())
        values = np.asarray([value for scores in lists for value in scores], np.float64)
        weights = np.concatenate([intervals.weights_of(scores) for scores in lists] or [values])
        return cls(tuple(subtasks), tuple(map(len, lists)), values, weights)

    @property
    def average(self) -> float:
        """Unweighted mean over the subtasks, in points of 100."""
        parts = np.split(self.values * self.weights, np.cumsum(self.counts)[:-1])
        return 100 * float(np.mean([part.mean() for part in parts]))


@dataclass(frozen=True)
class AgainstHighest:
    """A method against the highest of a ratio, in points; `p_holm` is corrected for its table."""

    suite: str
    models: Models
    ratio: float
    highest: str
    method: str
    difference: float
    low: float
    high: float
    p_value: float
    p_holm: float

    @property
    def is_lower(self) -> bool:
        """Whether it is significantly below the highest, at 5 %."""
        return self.p_holm < intervals.LEVEL


@dataclass(frozen=True)
class Result:
    """Published results of a combination; `missing`: reasons for missing scores.

    `cache` has the bytes of a request of the longest evaluated length over the original's, by
    engine: in `generate`, and in vLLM on one large GPU if the plugin serves the hybrid. `samples`
    are the scores behind the averages, by models and suite.
    """

    keys: Mapping[str, str]
    calibration_score: float
    calibration_log_likelihood: float
    costs: Mapping[str, float]
    notes: Sequence[str]
    rows: Sequence[ScoreRow]
    trained_tokens: int | None
    cache: Mapping[str, float] = field(default_factory=dict)
    missing: Sequence[str] = ()
    samples: Mapping[tuple[Models, str], SampleScores] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Comparison:
    """All combinations of a comparison, with the results so far.

    `failures` has the reasons of combinations without results. `paper` has the published scores of
    untrained hybrids by suite, ratio and method, if they are comparable.
    """

    recipe: str
    model: str
    folder: Path
    combinations: tuple[Combination, ...]
    with_training: bool
    results: Mapping[Combination, Result] = field(default_factory=dict)
    failures: Mapping[Combination, str] = field(default_factory=dict)
    paper: Mapping[str, Mapping[float, Mapping[str, float]]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.combinations)

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
        """Scores of all seeds, of one method or ratio if it is given."""
        return [
            (combination, row)
            for combination, result in self.results.items()
            if method in (None, combination.method) and ratio in (None, combination.ratio)
            for row in result.rows if row.models == models
        ]  # fmt: skip

    def results_of(self, method: str, ratio: float) -> list[Result]:
        """Results of all seeds of one method at one ratio."""
        results, key = self.results.items(), (method, ratio)
        return [result for run, result in results if (run.method, run.ratio) == key]

    def averages(self, models: Models, method: str, ratio: float, suite: str) -> list[ScoreRow]:
        return [row for _, row in self.rows(models, method, ratio) if row.place == (suite, "", 0)]

    def samples(self, models: Models, method: str, ratio: float, suite: str) -> list[SampleScores]:
        """Scores by sample of all seeds; empty if a suite's average is not a mean over subtasks."""
        samples = []
        for result in self.results_of(method, ratio):
            scores, place = result.samples.get((models, suite)), (models, suite, "")
            averages = [
                row.score for row in result.rows if (row.models, row.suite, row.task) == place
            ]
            if scores is None or not averages or abs(scores.average - averages[0]) > 0.01:
                return []
            samples.append(scores)
        return samples

    def tests(self, models: Models, suite: str) -> list[AgainstHighest]:
        """Every method against the highest of its ratio, on the same samples, over all seeds.

        Methods with other samples than the highest are left out. Since the samples determined the
        highest, each test is corrected as one among all pairs of methods at a ratio.
        """
        tests, pairs = [], 0
        for ratio in self.ratios:
            means = {
                method: statistics.fmean(row.score for row in rows)
                for method in self.methods
                if (rows := self.averages(models, method, ratio, suite))
            }
            highest = max(means, key=lambda method: means[method], default="")
            best = self.samples(models, highest, ratio, suite)
            for method in means:
                samples = self.samples(models, method, ratio, suite)
                layouts = {(sample.places, sample.counts) for sample in (*samples, *best)}
                if method == highest or not samples or not best or len(layouts) > 1:
                    continue
                tests.append((ratio, highest, method, _difference(tuple(samples), tuple(best))))
            tested = sum(test[0] == ratio for test in tests)
            pairs += tested * (tested + 1) // 2
        corrected = intervals.holm([test.p_value for *_, test in tests], pairs)
        return [
            AgainstHighest(
                suite=suite,
                models=models,
                ratio=ratio,
                highest=highest,
                method=method,
                difference=100 * test.mean,
                low=100 * test.low,
                high=100 * test.high,
                p_value=test.p_value,
                p_holm=p_holm,
            )
            for (ratio, highest, method, test), p_holm in zip(tests, corrected, strict=True)
        ]

    @property
    def originals(self) -> dict[tuple[str, str, int], tuple[Combination, ScoreRow]]:
        """The original model's scores by place.

        All combinations share them, but a suite's average is that of the combination with most of
        its tasks, since a task without a score in one combination is left out of its averages.
        """
        rows = self.rows("original")
        tasks = Counter((combination, row.suite) for combination, row in rows)
        scores: dict[tuple[str, str, int], tuple[Combination, ScoreRow]] = {}
        for combination, row in rows:
            present = scores.get(row.place)
            if present is None or tasks[combination, row.suite] > tasks[present[0], row.suite]:
                scores[row.place] = combination, row
        return scores

    @property
    def suites(self) -> list[str]:
        rows = (row for result in self.results.values() for row in result.rows)
        return list(dict.fromkeys(row.suite for row in rows))

    @property
    def missing(self) -> list[str]:
        """Reasons for missing scores of combinations, and of tasks and models within them."""
        sentences = [f"{failed} has no scores: {why}" for failed, why in self.failures.items()]
        for combination, result in self.results.items():
            sentences += [f"{combination}: {why}" for why in result.missing]
        return sentences


@functools.cache
def _difference(
    samples: tuple[SampleScores, ...], best: tuple[SampleScores, ...]
) -> intervals.CrossedTest:
    """Test of a method against the best on the same samples, over seeds; cached for all tables."""
    values, best_values = (np.stack([s.values for s in seeds]) for seeds in (samples, best))
    return intervals.crossed_test(values, best_values, samples[0].counts, samples[0].weights)


def group_of(method: str) -> str:
    """The group of a method's row; the last group for methods outside the paper."""
    if not any(method in scores for model in _published().values() for scores in model.values()):
        return _OTHERS
    return next(name for name, kinds in _GROUPS.items() if METHODS[method].kind in kinds)


# Fields of an answer from which scores are computed; prompts and outputs are dropped.
_SCORED = ("checkpoint", "suite", "task", "length", "document", "score")


def read_result(runner: Runner) -> Result:
    """Read what a combination's stages published; raises RunError if it cannot be read."""
    chosen = (node for node in runner.nodes if node.name in runner.chosen)
    folders = {node.name: runner.store.published(node.name, str(node.key)) for node in chosen}
    search = Search.read(folders["search"], folders["materialize"])
    score, log_likelihood = search.score_and_log_likelihood
    scores = Scores.read(folders["evaluate"])
    answers = (record for record in read_samples(folders["evaluate"]) if "score" in record)
    records = [{name: answer[name] for name in _SCORED if name in answer} for answer in answers]
    trained = scores.last_trained
    names: dict[Models, str] = {"original": ORIGINAL, "untrained": HYBRID, "trained": str(trained)}
    rows, samples = list[ScoreRow](), dict[tuple[Models, str], SampleScores]()
    for models, name in names.items():
        for suite, table in scores.checkpoints.get(name, {}).items():
            rows.append(ScoreRow(models, suite, "", 0, *interval_of(table)))
            for task, by_length in table.tasks.items():
                for length, mean in by_length.items():
                    score_and_ends = mean.score, mean.low, mean.high
                    rows.append(ScoreRow(models, suite, task, length, *score_and_ends))
            by_subtask = {
                (task, length): values
                for (task, length), values in SuiteAnswers.of(records, name, suite).scores.items()
                if length in table.tasks.get(task, {})
            }
            if by_subtask and models != "original":
                samples[models, suite] = SampleScores.of(by_subtask)
    longest = max((row.length for row in rows), default=0)
    costs = ("evaluations", "full_forward_equivalents", "model_seconds", "solver_seconds")
    return Result(
        keys={name: folder.name for name, folder in folders.items()},
        calibration_score=score,
        calibration_log_likelihood=log_likelihood,
        costs={
            name: value
            for name, value in search.summary.content.items()
            if name in costs or name.startswith("reused_")
        },
        notes=search.summary.notes,
        rows=rows,
        trained_tokens=checkpoint_tokens(trained) if trained else None,
        cache=_cache_shares(folders["materialize"], search, longest),
        missing=scores.notes(),
        samples=samples,
    )


def _cache_shares(folder: Path, search: Search, tokens: int) -> dict[str, float]:
    """Bytes of a request over the original's, by engine; empty if the scores have no length."""
    if not tokens:
        return {}
    cache = cache_size(MaterializeSummary.read(folder), search)
    shares = {"generate": cache.dynamic(tokens) / cache.original(tokens)}
    served = served_bytes(cache, search.mask, LARGE_GPU, [tokens])
    if not isinstance(served, str) and not served[0].refusal:
        shares["vllm"] = served[0].hybrid / served[0].original
    return shares


def paper_scores(recipe: Recipe) -> dict[str, dict[float, dict[str, float]]]:
    """NIAH averages of untrained hybrids by suite, ratio and method (BOSCH Table 1).

    Empty for another model, window, sinks, tasks or lengths; the number of samples may differ.
    """
    search, evaluate = recipe[SearchConfig], recipe.get(EvaluateConfig)
    by_ratio = _published().get(Path(recipe.model.path).name)
    has_other_window = search.window.size != 1024 or search.sinks
    if by_ratio is None or evaluate is None or has_other_window:
        return {}
    scores = {float(ratio): methods for ratio, methods in by_ratio.items()}
    return {name: scores for name, suite in evaluate.suites.items() if suite.matches_paper}


@functools.cache
def _published() -> dict[str, dict[str, dict[str, float]]]:
    """NIAH averages of BOSCH's Table 1 by model, ratio and method."""
    file = Path(__file__).with_name("paper_scores.json")
    scores: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text("utf-8"))["scores"]
    return scores
