"""Published results of the stages, prepared for the report.

Training or evaluation may be missing from the inputs, if the recipe leaves them out. A stage that
lacks a file of its output is an error, never an empty picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.files import exists
from bosch.front import Front
from bosch.heads import HeadMaskFile
from bosch.model.cache_size import CacheSize, OwnWindow
from bosch.search.methods import METHODS
from bosch.window import Window, windows_text
from stages.evaluate.scores import (
    HYBRID,
    ORIGINAL,
    Scores,
    SuiteScores,
    named_rival,
    read_samples,
)
from stages.materialize.stage import MODEL, MaterializeSummary, read_model_config
from stages.measure.stage import Efficiency, Point
from stages.prepare.stage import Statistics
from stages.published import Manifest
from stages.search.stage import FRONT, HEAD_MASK, SearchSummary
from stages.train.stage import TrainConfig, TrainingStep, checkpoint_tokens, read_metrics

# Stages that evaluate models.
_EVALUATING = ("original", "evaluate")


@dataclass(frozen=True)
class Search:
    """The head mask and its search; `front` is the front from which the mask was chosen."""

    mask: HeadMaskFile
    summary: SearchSummary
    front: Front | None = None

    @classmethod
    def read(cls, searched: Path, materialized: Path) -> Search:
        """Read the published directories of the stages search and materialize."""
        front, mask = None, searched / HEAD_MASK
        if exists(materialized / FRONT):
            front = Front.load(materialized / FRONT)
            mask = materialized / MODEL / HEAD_MASK
        return cls(HeadMaskFile.load(mask), SearchSummary.read(searched), front)

    @property
    def score_and_log_likelihood(self) -> tuple[float, float]:
        """Score and log-likelihood of the mask, on the search's examples.

        The summary of a search for a front has those of one point, which need not be the chosen
        one.
        """
        if self.front is None or self.front.chosen is None:
            return self.summary.best_score, self.summary.best_log_likelihood
        point = self.front.points[self.front.chosen]
        return point.score, point.log_likelihood

    @property
    def sliding(self) -> int:
        return self.mask.mask.num_sliding

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows of sliding heads from the widest down; the menu if no head slides."""
        menu, used = self.mask.windows, set(self.mask.mask.choices.flat)
        return tuple(window for choice, window in enumerate(menu, 1) if choice in used) or menu

    @property
    def heads(self) -> dict[Window | None, int]:
        """KV heads of the whole model by window; None: full heads."""
        rows = self.mask.mask.heads_per_layer(self.mask.windows)
        return {window: sum(row[window] for row in rows) for window in (None, *self.windows)}

    @property
    def window_sizes(self) -> str:
        """The windows as text, ascending."""
        return windows_text([Window(window.size) for window in self.windows])

    @property
    def total(self) -> int:
        """Number of KV heads in the whole model (N)."""
        return self.mask.num_layers * self.mask.num_key_value_heads


def label_of(name: str) -> str:
    """Display name of an evaluated model."""
    if name == ORIGINAL:
        return "Original"
    if name == HYBRID:
        return "Hybrid, untrained"
    if name in METHODS:
        return f"{METHODS[name].label}, untrained"
    if rival := named_rival(name):
        return f"{METHODS[rival[0]].label} after {rival[1]:,} tokens"
    return f"Hybrid after {checkpoint_tokens(name) or 0:,} tokens"


@dataclass(frozen=True)
class NeedleScores:
    """Needle scores of one evaluated model."""

    name: str
    suite: SuiteScores

    @property
    def average(self) -> float:
        """In points of 100."""
        return self.suite.average

    @property
    def tokens(self) -> int | None:
        """Training tokens: 0 for the untrained hybrid, None for the original."""
        return 0 if self.name == HYBRID else checkpoint_tokens(self.name)

    @property
    def method(self) -> str:
        """Method of a rival, trained or not."""
        trained = named_rival(self.name)
        return self.name if trained is None else trained[0]

    @property
    def label(self) -> str:
        return label_of(self.name)


# Checkpoint, suite, task, length.
ScoreKey = tuple[str, str, str, int]
# The suite of the headline scores and the charts.
NEEDLE = "needle"
# Samples that the page shows for each score.
SHOWN_SAMPLES = 3


def collect_predictions(
    records: Iterable[Mapping[str, Any]],
) -> dict[ScoreKey, list[Mapping[str, Any]]]:
    """The `SHOWN_SAMPLES` samples with the lowest scores behind each score."""
    cells: dict[ScoreKey, list[Mapping[str, Any]]] = {}
    for record in records:
        if "score" not in record:
            continue
        place = (record["checkpoint"], record["suite"], record["task"], record["length"])
        cell = cells.setdefault(place, [])
        cell.append(record)
        cell.sort(key=lambda record: (record["score"], record["index"]))
        del cell[SHOWN_SAMPLES:]
    return cells


# Scores in [0, 1] of one model by suite, task and length, in the order of the samples.
SampleScores = Mapping[tuple[str, str, int], list[float]]


def collect_scores(
    records: Iterable[Mapping[str, Any]], scores: Scores
) -> dict[str, dict[tuple[str, str, int], list[float]]]:
    """Scores of all models' samples, of tasks that have a score.

    `records` are in the order of samples.jsonl.
    """
    by_model: dict[str, dict[tuple[str, str, int], list[float]]] = {}
    for record in records:
        suite, task, length = place = record["suite"], record["task"], record["length"]
        table = scores.checkpoints.get(record["checkpoint"], {}).get(suite)
        if table is not None and length in table.tasks.get(task, {}):
            cells = by_model.setdefault(record["checkpoint"], {})
            cells.setdefault(place, []).append(record["score"])
    return by_model


@dataclass(frozen=True)
class Results:
    """All content of the report; `scores` and `training` are empty if the recipe has none."""

    search: Search
    cache: CacheSize
    positions: int | None
    training: list[TrainingStep]
    needle: list[NeedleScores]
    rivals: list[NeedleScores]
    materialized: MaterializeSummary
    scores: Scores
    statistics: dict[str, Any]
    present: frozenset[str]
    absent: tuple[str, ...]
    manifests: Mapping[str, Manifest]
    predictions: Mapping[ScoreKey, list[Mapping[str, Any]]]
    samples: Mapping[str, SampleScores]
    efficiency: Efficiency | None
    loss_in_words: str = ""  # `TrainConfig.loss_in_words`

    @property
    def measured_points(self) -> list[Point]:
        """The hybrid's measured points, the shortest first; empty without measurements."""
        return self.efficiency.hybrids if self.efficiency is not None else []

    def checkpoint(self, name: str | None) -> NeedleScores | None:
        return next((scores for scores in self.needle if scores.name == name), None)

    @property
    def trained(self) -> NeedleScores | None:
        """Scores of the checkpoint with the most training tokens, if any."""
        return self.checkpoint(self.scores.last_trained)

    @property
    def sample_count(self) -> int:
        """Needle samples of each model."""
        return next(scores.suite.samples for scores in [*self.needle, *self.rivals])

    @property
    def document_count(self) -> int:
        """Documents whose loss by position was measured."""
        return next((table.documents for table in self.scores.positions.values()), 0)

    @property
    def stage_seconds(self) -> list[tuple[str, float]]:
        """Wall time of each stage, in the order of the pipeline."""
        return [(stage, manifest.seconds) for stage, manifest in self.manifests.items()]

    @property
    def gpu_hours(self) -> dict[str, float]:
        """GPU hours of each stage."""
        return {stage: manifest.gpu_hours for stage, manifest in self.manifests.items()}

    @property
    def total_gpu_hours(self) -> float:
        return sum(self.gpu_hours.values())


def load_results(
    inputs: Mapping[str, Path], stages: Sequence[str] = (), train: TrainConfig | None = None
) -> Results:
    """Read the published directories in `inputs`; `stages` are all stages of the pipeline.

    `train` is the section of a training among them. Raises RunError or UserError, with the file, if
    a stage's output is incomplete.
    """
    search = Search.read(inputs["search"], inputs["materialize"])
    materialized = MaterializeSummary.read(inputs["materialize"])
    scores = Scores.read(inputs["evaluate"]) if "evaluate" in inputs else Scores(checkpoints={})
    needle, rivals = _needle_scores(scores)
    return Results(
        search=search,
        cache=cache_size(materialized, search),
        positions=read_model_config(inputs["materialize"]).max_positions,
        training=read_metrics(inputs["train"]) if "train" in inputs else [],
        needle=needle,
        rivals=rivals,
        materialized=materialized,
        scores=scores,
        predictions=collect_predictions(_answers(inputs)),
        samples=collect_scores(_answers(inputs), scores),
        efficiency=Efficiency.read(inputs["measure"]) if "measure" in inputs else None,
        loss_in_words=train.loss_in_words if train is not None else "",
        statistics=Statistics.read(inputs["prepare"]).content,
        present=frozenset(inputs),
        absent=tuple(stage for stage in stages if stage not in inputs),
        manifests={
            stage: Manifest.read(folder)
            for stage, folder in inputs.items()
            if exists(folder / Manifest.FILE)
        },
    )


def cache_size(materialized: MaterializeSummary, search: Search) -> CacheSize:
    """The cache sizes of the hybrid and of its original."""
    return CacheSize(
        bytes_per_head=materialized.kv_cache_bytes_per_token_before // search.total,
        heads=search.heads,
        own_windows=tuple(OwnWindow(**fields) for fields in materialized.own_windows),
        state_bytes=materialized.state_bytes,
    )


def _answers(inputs: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    for stage in _EVALUATING:
        if stage in inputs:
            yield from read_samples(inputs[stage])


def _needle_scores(scores: Scores) -> tuple[list[NeedleScores], list[NeedleScores]]:
    """Scores of the search's models, and of rivals.

    The search's models are the original, the untrained hybrid, and checkpoints in the order of
    training. Rivals are in ascending order of their score, with trained rivals last.
    """
    tables = scores.checkpoints.items()
    models = [NeedleScores(name, suites[NEEDLE]) for name, suites in tables if NEEDLE in suites]
    rivals = [model for model in models if model.name in METHODS or named_rival(model.name)]
    checkpoints = [model for model in models if model not in rivals]
    checkpoints.sort(key=lambda model: model.tokens or 0)  # the original is first in scores.json
    rivals.sort(key=lambda model: (named_rival(model.name) is not None, model.average))
    return checkpoints, rivals
