"""Published results of the stages, prepared for the report.

Training or evaluation may be missing from the inputs, if the recipe leaves them out. A stage that
lacks a file of its output is an error, never an empty picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bosch.files import exists
from bosch.front import Front
from bosch.heads import HeadMaskFile
from bosch.model.cache_size import CacheSize, OwnWindow
from bosch.model.stored_config import StoredConfig
from bosch.vllm.plan import request_bytes
from bosch.window import Window, windows_text
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, read_samples
from stages.materialize.stage import MODEL, MaterializeSummary, read_model_config
from stages.measure.stage import Efficiency, Point
from stages.prepare.stage import Statistics
from stages.published import Manifest
from stages.search.stage import FRONT, HEAD_MASK, SearchSummary
from stages.train.stage import TrainConfig, TrainingStep, checkpoint_tokens, read_metrics

# Stages that evaluate models.
_EVALUATING = ("original", "evaluate")
# Samples that the page shows for each score.
SHOWN_SAMPLES = 3
# Checkpoint, suite, task, length.
ScoreKey = tuple[str, str, str, int]
# Scores in [0, 1] of one model by suite, task and length, in the order of the samples.
SampleScores = Mapping[tuple[str, str, int], list[float]]


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


class Caches(NamedTuple):
    """Bytes of one request's KV cache: in `generate`, and in vLLM on one GPU (None: not served)."""

    original: int
    hybrid: int
    vllm_original: int | None
    vllm: int | None

    @property
    def share(self) -> float:
        return self.hybrid / self.original

    @property
    def vllm_share(self) -> float | None:
        return self.vllm / self.vllm_original if self.vllm and self.vllm_original else None


def label_of(name: str) -> str:
    """Display name of an evaluated model."""
    tokens = checkpoint_tokens(name)
    return {ORIGINAL: "Original", HYBRID: "Hybrid, untrained"}.get(
        name, f"Hybrid after {tokens or 0:,} tokens"
    )


def trained_tokens(name: str) -> int:
    """Training tokens of a model: 0 for untrained ones, -1 for the original."""
    return checkpoint_tokens(name) or -(name == ORIGINAL)


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
    config: StoredConfig
    training: list[TrainingStep]
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
    def models(self) -> list[str]:
        """Evaluated models by their training."""
        names = [name for name, suites in self.scores.checkpoints.items() if suites]
        names += [name for name in self.scores.positions if name not in names]
        return sorted(names, key=trained_tokens)

    @property
    def suites(self) -> list[str]:
        tables = self.scores.checkpoints.values()
        return list(dict.fromkeys(suite for suites in tables for suite in suites))

    @property
    def measured_points(self) -> list[Point]:
        """The hybrid's measured points, the shortest first; empty without measurements."""
        return self.efficiency.hybrids if self.efficiency is not None else []

    @property
    def lengths(self) -> list[int]:
        """Context lengths that were scored or measured."""
        lengths = {point.length for point in self.measured_points}
        for suites in self.scores.checkpoints.values():
            lengths |= {at for suite in suites.values() for at in suite.by_length if at}
        return sorted(lengths)

    def caches(self, tokens: int) -> Caches:
        """The caches of one request of `tokens` tokens."""
        rows = self.search.mask.mask.heads_per_layer(self.search.mask.windows)
        kinds = self.config.kinds
        full: list[dict[Window | None, int]] = [{None: sum(row.values())} for row in rows]
        itemsize = self.cache.bytes_per_head // (2 * kinds.head_dim)
        return Caches(
            self.cache.original(tokens), self.cache.dynamic(tokens),
            request_bytes(full, kinds, itemsize, tokens),
            request_bytes(rows, kinds, itemsize, tokens),
        )  # fmt: skip

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Wall time of each stage, in the order of the pipeline."""
        return {stage: manifest.seconds for stage, manifest in self.manifests.items()}

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
    return Results(
        search=search,
        cache=CacheSize(
            bytes_per_head=materialized.kv_cache_bytes_per_token_before // search.total,
            heads=search.heads,
            own_windows=tuple(OwnWindow(**fields) for fields in materialized.own_windows),
            state_bytes=materialized.state_bytes,
        ),
        config=read_model_config(inputs["materialize"]),
        training=read_metrics(inputs["train"]) if "train" in inputs else [],
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


def _answers(inputs: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    for stage in _EVALUATING:
        if stage in inputs:
            yield from read_samples(inputs[stage])
