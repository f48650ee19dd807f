"""Published stage directories with made-up results, as the report finds them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from stages.configs import (
    EvaluateConfig,
    MaterializeConfig,
    ModelConfig,
    NeedleEvaluation,
    PrepareConfig,
    ReportConfig,
    Runtime,
    SearchConfig,
    SourceConfig,
    TrainConfig,
)
from stages.context import StageConfig

SECONDS = {"prepare": 21.4, "search": 187.0, "materialize": 1.9, "train": 233.0, "evaluate": 4321.0}
TASKS = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
LENGTHS = [512, 1024, 2048]
BYTES_PER_HEAD = 128
CORPUS = {"name": "pydoc topics of Python 3", "words": 70_000, "sha256": "c" * 64}


def publish(
    root: Path, *, layers: int = 6, heads: int = 8, without: tuple[str, ...] = ()
) -> dict[str, Path]:
    """Write one directory per stage below `root`, but for those in `without`."""
    rng = random.Random(0)
    writers = {
        "prepare": _prepare,
        "search": lambda folder: _search(folder, layers, heads, rng),
        "materialize": lambda folder: _materialize(folder, layers, heads),
        "train": lambda folder: _train(folder, rng),
        "evaluate": lambda folder: _evaluate(folder, "train" not in without),
    }
    inputs = {}
    for stage, write in writers.items():
        if stage in without:
            continue
        folder = root / stage
        folder.mkdir(parents=True)
        write(folder)
        manifest = {
            "stage": stage,
            "key": f"{stage[0]}" * 64,
            "version": 1,
            "git_commit": "0123456789abcdef0123+",
            "packages": {"torch": "2.13.0", "numpy": "2.0.0"},
            "created": "2026-01-02T03:04:05+00:00",
            "seconds": SECONDS[stage],
            "config": {},
        }
        write_json(folder / "manifest.json", manifest)
        inputs[stage] = folder
    return inputs


def config(inputs: dict[str, Path], title: str | None = None) -> StageConfig:
    """The report's configuration for a recipe with the stages in `inputs`."""
    sections = {
        "prepare": PrepareConfig(
            sequence_length=2048,
            train_tokens=4_000_000,
            sources=[SourceConfig(name="python", kind="python_docs")],
        ),
        "search": SearchConfig(swa_ratio=0.75, window_size=128, tie_break="log_likelihood"),
        "materialize": MaterializeConfig(),
        "train": TrainConfig(total_tokens=4_000_000, checkpoint_tokens=[1_000_000, 4_000_000]),
        "evaluate": EvaluateConfig(needle=NeedleEvaluation(lengths=LENGTHS, samples=50)),
    }
    return StageConfig(
        section=ReportConfig(title=title),
        model=ModelConfig(path="recipes/tiny/base<model>"),
        seed=17,
        runtime=Runtime(),
        upstream={stage: sections[stage] for stage in inputs},
    )


def write_json(path: Path, value: Any) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


def sliding_heads(layers: int, heads: int) -> list[list[int]]:
    """Three quarters of all heads, spread unevenly over the layers."""
    quotas = [heads, heads // 2, 3 * heads // 4]
    return [
        sorted((layer + k) % heads for k in range(quotas[layer % 3])) for layer in range(layers)
    ]


def _prepare(folder: Path) -> None:
    statistics = {
        "train": {
            "sequences": 1954,
            "tokens": 4_001_792,
            "sources": {"python": {"documents": 812}},
        },
        "calibration": {"examples": 24, "length": 512},
    }
    write_json(folder / "statistics.json", statistics)


def _search(folder: Path, layers: int, heads: int, rng: random.Random) -> None:
    mask = {
        "format": 1, "model": "base", "method": "bosch", "swa_ratio": 0.75, "window_size": 128,
        "sinks": 0, "num_layers": layers, "num_key_value_heads": heads,
        "swa_kv_heads": sliding_heads(layers, heads), "score": 0.92, "seed": 17,
    }  # fmt: skip
    write_json(folder / "head_mask.json", mask)
    trace: list[dict[str, Any]] = []
    _evaluate_unit(trace, "anchors", "all sliding", [0.02])
    _evaluate_unit(trace, "anchors", "all full", [1.0])
    for layer in reversed(range(layers)):
        mean = 0.6 + 0.35 * layer / layers
        _evaluate_unit(trace, "layer_importance", f"layer {layer}", _scores(rng, mean, 28))
    for group in range(3):
        mean = 0.8 - 0.2 * group
        _evaluate_unit(trace, "head_selection", f"group {group}", _scores(rng, mean, 50))
    _evaluate_unit(trace, "final", "final mask", [0.92])
    importance = [
        {
            "layer": layer,
            "best_score": 0.7 + 0.3 * (layer + 1) / layers,
            "drop": 0.3 - 0.3 * (layer + 1) / layers,
            "weight": 1 - layer / max(layers - 1, 1),
            "ratio": (0.5, 0.75, 1.0)[layer % 3],
        }
        for layer in range(layers)
    ]
    summary = {
        "anchors": {"all_sliding": 0.02, "all_full": 1.0},
        "best_score": 0.92, "best_log_likelihood": -0.41, "evaluations": len(trace),
        "model_seconds": 171.0, "solver_seconds": 4.0, "full_forward_equivalents": 143.2,
        "naive_full_forward_equivalents": float(len(trace)), "layer_importance": importance,
        "trace": trace, "notes": ["Stage 1: 2 layers tie at score 1."],
    }  # fmt: skip
    write_json(folder / "summary.json", summary)


def _scores(rng: random.Random, mean: float, count: int) -> list[float]:
    return [min(1.0, max(0.0, round(rng.gauss(mean, 0.15) * 24) / 24)) for _ in range(count)]


def _evaluate_unit(trace: list[dict[str, Any]], stage: str, unit: str, scores: list[float]) -> None:
    best = 0.0
    for score in scores:
        best = max(best, score)
        trace.append(
            {
                "stage": stage, "step": len(trace) + 1, "unit": unit, "score": score,
                "log_likelihood": -0.2 - 9 * (1 - score), "best_score": best,
            }
        )  # fmt: skip


def _materialize(folder: Path, layers: int, heads: int) -> None:
    total = layers * heads
    sliding = sum(map(len, sliding_heads(layers, heads)))
    summary = {
        "parameters": 7_345_920,
        "kv_cache_bytes_per_token_before": total * BYTES_PER_HEAD,
        "kv_cache_bytes_per_token_after": (total - sliding) * BYTES_PER_HEAD,
    }
    write_json(folder / "summary.json", summary)


def _train(folder: Path, rng: random.Random) -> None:
    lines = []
    for step in range(1, 201):
        loss = 2.1 + 0.9 * math.exp(-step / 40) + rng.gauss(0, 0.04)
        lines.append({"step": step, "tokens": step * 20_000, "loss": loss, "learning_rate": 1e-4})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    summary = {"final_loss": lines[-1]["loss"], "tokens": 4_000_000, "steps": 200, "seconds": 230.0}
    write_json(folder / "summary.json", summary)


def _evaluate(folder: Path, trained: bool) -> None:
    averages = {"original": 97.5, "hybrid": 31.0}
    if trained:
        averages |= {"tokens-4000000": 96.0, "tokens-1000000": 78.5}
    checkpoints = {name: {"needle": _suite(average)} for name, average in averages.items()}
    write_json(folder / "scores.json", {"checkpoints": checkpoints, "corpus": CORPUS})


def _suite(average: float) -> dict[str, Any]:
    suite: dict[str, Any] = {"average": average, "standard_error": 1.25}
    for index, task in enumerate(TASKS):
        suite[task] = {
            str(length): {
                "score": max(0.0, min(100.0, average + 2 * (1 - index))),
                "standard_error": 2.5,
                "samples": 50,
            }
            for length in LENGTHS
        }
    suite["by_length"] = {str(length): average for length in LENGTHS}
    return suite
