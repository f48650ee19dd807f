"""Search and evaluate stages that give scores by method and ratio, for tests of comparisons."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.heads import HeadMask, HeadMaskFile
from stages.context import StageConfig
from stages.evaluate.scores import Scores, write_samples
from stages.materialize.stage import MODEL, MaterializeSummary
from stages.search.stage import FRONT, HEAD_MASK, SearchConfig, SearchSummary
from tests.front_case import nested_front

VERSION = 1
SAMPLES = 40
# By length: the difference of a task's score from the average.
LENGTHS = {256: 1.0, 512: -1.0}


def hybrid_score(method: str, ratio: float, seed: int | None) -> float:
    base = {"bosch": 90.0, "rand": 30.0}.get(method, 50.0 + zlib.crc32(method.encode()) % 20)
    return base - 20 * ratio + (seed or 0)


def search(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    section = config.section
    assert isinstance(section, SearchConfig)
    score = hybrid_score(section.method, section.stated_ratio or 0.0, section.seed)
    summary = {
        "anchors": {"all_sliding": 0.0, "all_full": 1.0},
        "best_score": score / 100,
        "best_log_likelihood": -1.0,
        "evaluations": 12,
        "reused_evaluations": 2,
        "full_forward_equivalents": 4.0,
        "reused_full_forward_equivalents": 2.0,
        "naive_full_forward_equivalents": 12.0,
        "model_seconds": 3.0,
        "solver_seconds": 0.5,
        "layer_importance": [],
        "trace": [],
        "notes": [],
    }
    SearchSummary.model_validate(summary).write(work_dir)
    (work_dir / "hybrid.json").write_text(json.dumps(score))
    mask = HeadMask.from_swa_kv_heads([[0, 1], [0, 1, 2], [1], []], 4)
    HeadMaskFile.of(
        mask, section.window, model="m", method=section.method,
        swa_ratio=mask.swa_ratio, seed=0,
    ).save(work_dir / HEAD_MASK)  # fmt: skip
    return summary


def materialize(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    (work_dir / "hybrid.json").write_text((inputs["search"] / "hybrid.json").read_text())
    (work_dir / MODEL).mkdir()
    mask = HeadMaskFile.load(inputs["search"] / HEAD_MASK)
    mask.save(work_dir / MODEL / HEAD_MASK)
    section = config.upstream_section(SearchConfig)
    if section.method == "front":  # masks of a front's points are not compared
        chosen = 1 if section.stated_ratio == 0.5 else 2
        nested_front(4, 4, mask.windows, chosen=chosen).save(work_dir / FRONT)
    MaterializeSummary(
        parameters=1,
        kv_cache_bytes_per_token_before=16 * 32,
        kv_cache_bytes_per_token_after=10 * 32,
        sliding_bytes_constant=6 * 31 * 32,
    ).write(work_dir)
    return {}


def evaluate(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    score = json.loads((inputs["materialize"] / "hybrid.json").read_text())
    original = Scores.read(inputs["original"]).averages["original"]["needle"]
    averages = {"original": original, "hybrid": score}
    if "train" in inputs:
        averages |= {"tokens-1024": score + 1, "tokens-2048": score + 5}
    _write_scores(work_dir, averages)
    return {}


def original(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    _write_scores(work_dir, {"original": 97.0})
    return {}


def _cell(value: float) -> dict[str, float]:
    return {
        "score": value, "low": value - 1, "high": value + 1, "standard_error": 1.0,
        "samples": SAMPLES // len(LENGTHS),
    }  # fmt: skip


def _write_scores(folder: Path, averages: Mapping[str, float]) -> None:
    checkpoints = {
        name: {
            "needle": {
                "average": value,
                "low": value - 1,
                "high": value + 1,
                "vt": {str(length): _cell(value + more) for length, more in LENGTHS.items()},
            }
        }
        for name, value in averages.items()
    }
    Scores.model_validate({"checkpoints": checkpoints, "corpus": {}}).write(folder)
    places = {("vt", length): more for length, more in LENGTHS.items()}
    places["odd", 512] = 600.0  # it has no score, since this is no share of 1
    write_samples(
        folder,
        (
            {
                "checkpoint": name,
                "suite": "needle",
                "task": task,
                "length": length,
                "index": i,
                "score": (value + more) / 100,
                "output": f"says {name}",
            }
            for name, value in averages.items()
            for (task, length), more in places.items()
            for i in range(SAMPLES // len(LENGTHS))
        ),
    )
