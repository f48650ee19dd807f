"""Reads what the stages published into the few typed values the report shows.

A stage that is missing from the inputs is no part of the recipe and stays None; a stage that is
there but lacks a file it promises is an error, never an empty picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.errors import RunError

STAGES = ("prepare", "search", "materialize", "train", "evaluate")
ORIGINAL, HYBRID, TOKENS = "original", "hybrid", "tokens-"


@dataclass(frozen=True)
class Search:
    """The head mask and how it was found."""

    mask: dict[str, Any]
    summary: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.mask["num_layers"])

    @property
    def num_key_value_heads(self) -> int:
        return int(self.mask["num_key_value_heads"])

    @property
    def swa_kv_heads(self) -> list[list[int]]:
        return [list(map(int, heads)) for heads in self.mask["swa_kv_heads"]]

    @property
    def sliding(self) -> int:
        """Number of sliding KV heads in the whole model."""
        return sum(len(heads) for heads in self.swa_kv_heads)

    @property
    def total(self) -> int:
        """Number of KV heads in the whole model (N)."""
        return self.num_layers * self.num_key_value_heads

    @property
    def window_size(self) -> int:
        return int(self.mask["window_size"])

    @property
    def sinks(self) -> int:
        return int(self.mask["sinks"])


@dataclass(frozen=True)
class Cache:
    """KV-cache sizes in bytes, for one sequence."""

    bytes_per_head: float
    full_heads: int
    sliding_heads: int
    kept: int

    @property
    def before_per_token(self) -> float:
        """Growth per token of the original model."""
        return self.bytes_per_head * (self.full_heads + self.sliding_heads)

    @property
    def after_per_token(self) -> float:
        """Growth per token of the hybrid model once its windows are full."""
        return self.bytes_per_head * self.full_heads

    @property
    def window_bytes(self) -> float:
        """What the sliding heads hold at most, whatever the context length."""
        return self.bytes_per_head * self.sliding_heads * self.kept

    def before(self, length: int) -> float:
        """Bytes of the original model's cache after `length` tokens."""
        return self.before_per_token * length

    def after(self, length: int) -> float:
        """Bytes of the hybrid model's cache after `length` tokens."""
        sliding = self.bytes_per_head * self.sliding_heads * min(length, self.kept)
        return self.after_per_token * length + sliding


@dataclass(frozen=True)
class Training:
    """Metrics of every logged step and the run's totals."""

    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def points(self) -> list[tuple[float, float]]:
        """Tokens and loss of every logged step whose loss is a finite number."""
        rows = [(row["tokens"], row["loss"]) for row in self.metrics]
        return [
            (float(tokens), float(loss))
            for tokens, loss in rows
            if isinstance(loss, int | float) and math.isfinite(loss)
        ]


@dataclass(frozen=True)
class NeedleScores:
    """Needle scores of one checkpoint, in points of 100."""

    name: str
    average: float
    standard_error: float | None
    by_length: dict[int, float]
    tasks: dict[str, dict[int, float]]
    samples: int

    @property
    def tokens(self) -> int | None:
        """Training tokens so far: 0 for the untrained hybrid, None for the original."""
        if self.name == ORIGINAL:
            return None
        return 0 if self.name == HYBRID else int(self.name.removeprefix(TOKENS))

    @property
    def label(self) -> str:
        """The checkpoint's name for people."""
        if self.name == ORIGINAL:
            return "Original"
        return (
            "Hybrid, untrained" if self.name == HYBRID else f"Hybrid after {self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class Results:
    """All that the report shows; None marks what the recipe has no stage for."""

    search: Search | None
    cache: Cache | None
    parameters: int | None
    training: Training | None
    needle: list[NeedleScores] | None
    corpus: dict[str, Any] | None
    statistics: dict[str, Any] | None
    present: frozenset[str]
    manifests: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def checkpoint(self, name: str) -> NeedleScores | None:
        """Scores of the checkpoint of that name, if it was evaluated."""
        return next((scores for scores in self.needle or [] if scores.name == name), None)

    @property
    def trained(self) -> NeedleScores | None:
        """Scores of the checkpoint with the most training tokens, if any was evaluated."""
        trained = [scores for scores in self.needle or [] if scores.tokens]
        return max(trained, key=lambda scores: scores.tokens or 0, default=None)

    @property
    def stage_seconds(self) -> list[tuple[str, float]]:
        """Wall time of each stage whose manifest tells it, in the order of the pipeline."""
        return [
            (stage, float(self.manifests[stage]["seconds"]))
            for stage in STAGES
            if isinstance(self.manifests.get(stage, {}).get("seconds"), int | float)
        ]


def load_results(inputs: Mapping[str, Path]) -> Results:
    """Read the published directories in `inputs`.

    Raises RunError, naming the file, when a stage's directory lacks or garbles what it promises.
    """
    search = _load_search(inputs["search"]) if "search" in inputs else None
    cache, parameters = None, None
    if "materialize" in inputs:
        summary = _read_json(inputs["materialize"] / "summary.json")
        parameters = summary.get("parameters")
        if search is not None:
            cache = _cache(search, summary, inputs["materialize"] / "summary.json")
    needle, corpus = _load_scores(inputs["evaluate"]) if "evaluate" in inputs else (None, None)
    return Results(
        search=search,
        cache=cache,
        parameters=parameters,
        training=_load_training(inputs["train"]) if "train" in inputs else None,
        needle=needle,
        corpus=corpus,
        statistics=_read_json(inputs["prepare"] / "statistics.json")
        if "prepare" in inputs
        else None,
        present=frozenset(inputs),
        manifests={
            stage: _read_json(inputs[stage] / "manifest.json")
            for stage in STAGES
            if stage in inputs and (inputs[stage] / "manifest.json").exists()
        },
    )


def _load_search(folder: Path) -> Search:
    mask = _read_json(folder / "head_mask.json")
    needed = ("num_layers", "num_key_value_heads", "swa_kv_heads", "window_size", "sinks")
    _require(mask, needed, folder / "head_mask.json")
    if len(mask["swa_kv_heads"]) != mask["num_layers"]:
        raise RunError(f"{folder / 'head_mask.json'}: swa_kv_heads and num_layers disagree")
    return Search(mask, _read_json(folder / "summary.json"))


def _cache(search: Search, summary: dict[str, Any], path: Path) -> Cache:
    _require(summary, ("kv_cache_bytes_per_token_before",), path)
    return Cache(
        bytes_per_head=summary["kv_cache_bytes_per_token_before"] / search.total,
        full_heads=search.total - search.sliding,
        sliding_heads=search.sliding,
        kept=search.window_size - 1 + search.sinks,
    )


def _load_training(folder: Path) -> Training:
    path = folder / "metrics.jsonl"
    metrics = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        record = _parse(line, f"{path}, line {number}")
        if "loss" in record:
            _require(record, ("tokens", "loss"), path)
            metrics.append(record)
    return Training(metrics, _read_json(folder / "summary.json"))


def _load_scores(folder: Path) -> tuple[list[NeedleScores] | None, dict[str, Any] | None]:
    path = folder / "scores.json"
    scores = _read_json(path)
    _require(scores, ("checkpoints",), path)
    found = [
        _needle_scores(name, suites["needle"], path)
        for name, suites in scores["checkpoints"].items()
        if "needle" in suites
    ]
    order = {ORIGINAL: -2, HYBRID: -1}
    found.sort(key=lambda one: order.get(one.name, one.tokens or 0))
    return found or None, scores.get("corpus")


def _needle_scores(name: str, suite: dict[str, Any], path: Path) -> NeedleScores:
    _require(suite, ("average",), path)
    if name not in (ORIGINAL, HYBRID) and not name.removeprefix(TOKENS).isdigit():
        raise RunError(f"{path}: checkpoint '{name}' is none of original, hybrid, tokens-<n>")
    cells = {task: by for task, by in suite.items() if isinstance(by, dict) and task != "by_length"}
    return NeedleScores(
        name=name,
        average=float(suite["average"]),
        standard_error=suite.get("standard_error"),
        by_length={int(key): float(value) for key, value in suite.get("by_length", {}).items()},
        tasks={
            task: {int(length): float(cell["score"]) for length, cell in by.items()}
            for task, by in cells.items()
        },
        samples=sum(int(cell.get("samples", 0)) for by in cells.values() for cell in by.values()),
    )


def _require(record: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> None:
    missing = [key for key in keys if key not in record]
    if missing:
        raise RunError(f"{path}: no {', '.join(missing)}; run the stage again with --force")


def _read_json(path: Path) -> dict[str, Any]:
    return _parse(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read for the report ({error})") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{where}: damaged, not JSON ({error})") from error
    if not isinstance(value, dict):
        raise RunError(f"{where}: damaged, not a JSON object")
    return value
