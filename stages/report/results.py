"""Published results of the stages, prepared for the report.

Training or evaluation may be missing from the inputs, if the recipe leaves them out. A stage that
lacks a file of its output is an error, never an empty picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bosch.engines.vllm.plan import request_bytes
from bosch.files import exists
from bosch.mask_files import Front, HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.cache_size import CacheSize
from bosch.model.stored_config import StoredConfig
from stages.evaluate.scores import (
    HYBRID,
    ORIGINAL,
    PositionLoss,
    Scores,
    SuiteScores,
    is_hybrid,
    read_samples,
)
from stages.materialize.stage import MODEL, MaterializeSummary, read_model_config
from stages.measure.stage import Efficiency, Point
from stages.published import Manifest
from stages.search.stage import FRONT, HEAD_MASK, SearchSummary
from stages.train.stage import TrainingStep, checkpoint_tokens, read_metrics

# Suite, task, length.
Place = tuple[str, str, int]
# Scores in [0, 1] of one model's samples, by what identifies a sample.
SampleScores = Mapping[Place, Mapping[str, float]]


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


class Model(NamedTuple):
    """An evaluated model: its name in scores.json, and its branch ("" for the recipe itself)."""

    name: str
    branch: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of its training."""
        return checkpoint_tokens(self.name) or 0

    @property
    def is_hybrid(self) -> bool:
        return is_hybrid(self.name)

    @property
    def label(self) -> str:
        if self.name == ORIGINAL:
            return f"Original of {self.branch}" if self.branch else "Original"
        if not self.is_hybrid:
            return self.name
        name = self.branch or "Hybrid"
        return f"{name} after {self.tokens:,} tokens" if self.tokens else f"{name}, untrained"


@dataclass(frozen=True)
class Branch:
    """The hybrids of the recipe, or of a branch; `scores` are empty without an evaluation.

    `front` is the front from which the mask was chosen. `samples` are those of each model by name,
    the original's among them.
    """

    found: HeadMaskFile
    search: SearchSummary
    front: Front | None
    materialized: MaterializeSummary
    config: StoredConfig
    scores: Scores
    samples: Mapping[str, SampleScores]
    folders: Mapping[str, Path]  # of its stages, some of which are other branches', too

    @classmethod
    def read(cls, inputs: Mapping[str, Path]) -> Branch:
        """Read the published directories of a branch's stages."""
        made, front = inputs["materialize"], inputs["search"] / FRONT
        scores = Scores.read(inputs["evaluate"]) if "evaluate" in inputs else Scores(checkpoints={})
        evaluating = [inputs[stage] for stage in ("original", "evaluate") if stage in inputs]
        return cls(
            HeadMaskFile.load(made / MODEL / HEAD_MASK),
            SearchSummary.read(inputs["search"]),
            Front.load(front) if exists(front) else None,
            MaterializeSummary.read(made),
            read_model_config(made),
            scores,
            sample_scores(chain.from_iterable(map(read_samples, evaluating)), scores),
            dict(inputs),
        )

    @property
    def names(self) -> list[str]:
        """Names of evaluated models by their training."""
        names = [name for name, suites in self.scores.checkpoints.items() if suites]
        names += [name for name in self.scores.positions if name not in names]
        return sorted(names, key=lambda name: checkpoint_tokens(name) or -(name == ORIGINAL))

    def caches(self, tokens: int) -> Caches:
        """The caches of one request of `tokens` tokens."""
        kinds, summary, mask = self.config.kinds, self.materialized, self.found.mask
        full = HeadMask.all_full(*mask.shape).layers
        bytes_per_head = summary.kv_cache_bytes_per_token_before // int(mask.is_full.size)
        itemsize = bytes_per_head // (2 * kinds.head_dim)
        cache = CacheSize.of(mask.layers, kinds, itemsize, state_bytes=summary.state_bytes)
        longest = self.config.max_positions
        return Caches(
            cache.original(tokens), cache.dynamic(tokens),
            request_bytes(full, kinds, itemsize, tokens, longest),
            request_bytes(mask.layers, kinds, itemsize, tokens, longest),
        )  # fmt: skip


@dataclass(frozen=True)
class Results:
    """All content of the report; `training` is empty if the recipe has none."""

    branches: Mapping[str, Branch]  # the recipe itself first, as ""
    training: list[TrainingStep]
    manifests: Mapping[str, Manifest]
    efficiency: Efficiency | None

    @property
    def main(self) -> Branch:
        return self.branches[""]

    @property
    def models(self) -> list[Model]:
        """Evaluated models, each once, by branch and training."""
        seen: dict[Path, Model] = {}
        for branch, results in self.branches.items():
            for name in results.names:
                stage = "train" if checkpoint_tokens(name) else "original"
                stage = "materialize" if name == HYBRID else stage
                place = results.folders.get(stage, Path()) / name
                seen.setdefault(place, Model(name, branch))
        return list(seen.values())

    def tables(self, model: Model) -> Mapping[str, SuiteScores]:
        """A model's scores by suite."""
        return self.branches[model.branch].scores.checkpoints.get(model.name, {})

    def positions(self, model: Model) -> PositionLoss | None:
        """A model's loss by position."""
        return self.branches[model.branch].scores.positions.get(model.name)

    def samples(self, model: Model) -> SampleScores:
        """Scores of a model's samples."""
        return self.branches[model.branch].samples.get(model.name, {})

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(suite for model in self.models for suite in self.tables(model)))

    @property
    def notes(self) -> list[str]:
        """Remarks on scores of all branches."""
        scores = (branch.scores for branch in self.branches.values())
        return list(dict.fromkeys(note for one in scores for note in one.notes()))

    @property
    def measured_points(self) -> list[Point]:
        """The hybrid's measured points, the shortest first; empty without measurements."""
        return self.efficiency.hybrids if self.efficiency is not None else []

    @property
    def lengths(self) -> list[int]:
        """Context lengths that were scored or measured, else the model's positions."""
        lengths = {point.length for point in self.measured_points}
        for model in self.models:
            lengths |= {at for suite in self.tables(model).values() for at in suite.by_length if at}
        return sorted(lengths) or [self.main.config.max_positions or 32 * 1024]


def sample_scores(
    records: Iterable[Mapping[str, Any]], scores: Scores
) -> dict[str, dict[Place, dict[str, float]]]:
    """Scores of all models' samples, of tasks that have a score."""
    by_model: dict[str, dict[Place, dict[str, float]]] = {}
    for record in records:
        suite, task, length = place = record["suite"], record["task"], record["length"]
        table = scores.checkpoints.get(record["checkpoint"], {}).get(suite)
        if table is not None and length in table.tasks.get(task, {}):
            # Two samples with one index are different questions if the seeds differ.
            sample = f"{record['index']}: {record.get('question')}"
            cells = by_model.setdefault(record["checkpoint"], {})
            cells.setdefault(place, {})[sample] = record["score"]
    return by_model


def load_results(inputs: Mapping[str, Path]) -> Results:
    """Read the published directories of stages in `inputs`; of a branch `<stage>@<branch>`.

    Raises RunError or UserError, with the file, if a stage's output is incomplete.
    """
    places: dict[str, dict[str, Path]] = {"": {}}
    owners: dict[Path, str] = {}  # the first name of a folder that branches share
    for name, folder in inputs.items():
        stage, _, branch = name.partition("@")
        places.setdefault(branch, {})[stage] = folder
        owners.setdefault(folder, name)
    main = places[""]
    return Results(
        branches={branch: Branch.read(folders) for branch, folders in places.items()},
        training=read_metrics(main["train"]) if "train" in main else [],
        efficiency=Efficiency.read(main["measure"]) if "measure" in main else None,
        manifests={
            name: Manifest.read(folder)
            for folder, name in owners.items()
            if exists(folder / Manifest.FILE)
        },
    )
