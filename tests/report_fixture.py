"""Published stage directories with made-up results, as the report reads them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bosch.journal import Journal
from bosch.mask_files import HeadMaskFile, HeldOut
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores
from stages.evaluate.stage import EvaluateConfig, RulerConfig
from stages.evaluate.tables import Cells, position_table, suite_table
from stages.materialize.stage import MODEL, MaterializeConfig, MaterializeSummary
from stages.measure.stage import Efficiency, MeasureConfig
from stages.prepare.stage import PrepareConfig, SourceConfig
from stages.report.stage import ReportConfig
from stages.search.stage import FRONT, HEAD_MASK, SearchConfig, SearchSummary
from stages.train.stage import METRICS, TrainConfig
from tests.front_case import nested_front
from tests.hybrid_case import sliding_mask

SECONDS = {
    "prepare": 21.4, "search": 187.0, "materialize": 1.9, "measure": 9.0, "train": 233.0,
    "original": 1234.0, "evaluate": 4321.0,
}  # fmt: skip
SHARED = ("prepare", "original")
GPUS = {"prepare": 0, "materialize": 1, "measure": 1}
TASKS = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
LENGTHS = [512, 1024, 2048]
SAMPLES = 200
BYTES_PER_HEAD = 128
AVERAGES = {
    ORIGINAL: 97.5,
    HYBRID: 31.0,
    "tokens-1000000": 78.5,
    "tokens-4000000": 96.0,
}
BRANCH = "intr"
BRANCH_AVERAGES = {ORIGINAL: 97.5, HYBRID: 12.0, "tokens-1000000": 13.0, "tokens-4000000": 90.0}
CORPUS = {"name": "pydoc topics of Python 3", "words": 70_000, "sha256": "c" * 64}


def publish(
    root: Path, *, layers: int = 6, heads: int = 8, without: tuple[str, ...] = ()
) -> dict[str, Path]:
    """Write one directory per stage and branch below `root`, except for those in `without`."""
    rng = random.Random(0)
    checkpoints = () if "train" in without else ("tokens-1000000", "tokens-4000000")
    evaluated = (ORIGINAL, HYBRID, *checkpoints)
    writers = {
        "prepare": lambda folder: None,  # the report reads nothing of it
        "search": lambda folder: _search(folder, layers, heads, rng),
        "materialize": lambda folder: _materialize(folder, layers, heads),
        "measure": _measure,
        "train": lambda folder: _train(folder, rng),
        "original": lambda folder: evaluate(folder, ORIGINAL),
        "evaluate": lambda folder: evaluate(folder, *evaluated),
    }
    own = {name: writers[name] for name in ("search", "materialize", "train")}
    own["evaluate"] = lambda folder: evaluate(folder, *evaluated, averages=BRANCH_AVERAGES)
    writers |= {f"{name}@{BRANCH}": write for name, write in own.items()}
    inputs = {}
    for name, write in writers.items():
        stage = name.partition("@")[0]
        if stage in without:
            continue
        folder = root / name
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
            "gpus": GPUS.get(stage, 8),
            "gpu_seconds": SECONDS[stage] * GPUS.get(stage, 8),
            "config": {},
        }
        write_json(folder / "manifest.json", manifest)
        inputs[name] = folder
    # The branch shares these stages.
    return inputs | {f"{name}@{BRANCH}": inputs[name] for name in SHARED if name in inputs}


def publish_front(root: Path) -> dict[str, Path]:
    """Stages of a recipe with a front and a budget in bytes, whose original ran out of memory.

    A search by swaps, two windows, a suite of prompts, and no checkpoints.
    """
    inputs = publish(root, without=("train",))
    inputs = {name: folder for name, folder in inputs.items() if "@" not in name}
    evaluate(inputs["evaluate"], ORIGINAL, HYBRID)
    front = nested_front(6, 8, (Window(128), Window(32)), context=2048)
    points = [
        replace(point, bytes=BYTES_PER_HEAD * point.kv_slots,
                held_out=HeldOut(point.score, point.score - 0.1, point.score))
        for point in front.points
    ]  # fmt: skip
    replace(front, points=tuple(points)).save(inputs["search"] / FRONT)
    mask = points[2].mask
    (inputs["search"] / HEAD_MASK).unlink()
    HeadMaskFile(mask, "m", "front").save(inputs["materialize"] / MODEL / HEAD_MASK)
    # A search by swaps. The second evaluation has no log-likelihood; the final mask was evaluated
    # fourth.
    phases = ("anchors", "anchors", "start", "swaps", "swaps", "swaps", "final")
    searched = json.loads((inputs["search"] / SearchSummary.FILE).read_text())
    searched["trace"] = [
        {"phase": phase, "step": step, "subproblem": phase, "score": step / 10,
         "log_likelihood": -step, "best_score": 0.7,
         "mask": mask.key if step in (4, 6) else "another"}
        for step, phase in enumerate(phases, start=1)
    ]  # fmt: skip
    SearchSummary.model_validate(searched).write(inputs["search"])
    summary = json.loads((inputs["materialize"] / "summary.json").read_text())
    MaterializeSummary.model_validate(summary | {"point": 2}).write(inputs["materialize"])
    efficiency = json.loads((inputs["measure"] / Efficiency.FILE).read_text())
    *others, original, hybrid = efficiency["points"]
    none = dict.fromkeys(hybrid["over_original"])
    original |= {**none, "out_of_memory": True}
    hybrid |= {"over_original": None}
    efficiency["points"] = [*others, original, hybrid]
    Efficiency.model_validate(efficiency).write(inputs["measure"])
    scores = json.loads((inputs["evaluate"] / Scores.FILE).read_text())
    right = {("2 needles", 1024): [1.0, 0.5, 0.25], ("4 needles", 2048): [1.0, 1.0]}
    wrong = {("2 needles", 1024): [0.5, 0.5, 0.25], ("4 needles", 2048): [0.0, 1.0]}
    scores["checkpoints"][ORIGINAL]["lm_eval"] = suite_table(cells(right))
    scores["checkpoints"][HYBRID]["lm_eval"] = suite_table(cells(wrong), cells(right))
    write_json(inputs["evaluate"] / Scores.FILE, scores)
    return inputs


def config(inputs: dict[str, Path], **section: Any) -> StageConfig:
    """The report's configuration for a recipe with the stages in `inputs`."""
    sections = {
        "prepare": PrepareConfig(
            sequence_length=2048,
            train_tokens=4_000_000,
            sources=[SourceConfig(name="python", kind="python_docs")],
        ),
        "search": SearchConfig(swa_ratio=0.75, window_size=128),
        "materialize": MaterializeConfig(),
        "measure": MeasureConfig(lengths=[512, 2048]),
        "train": TrainConfig(total_tokens=4_000_000, checkpoint_tokens=[1_000_000, 4_000_000]),
        "original": EvaluateConfig(),
        "evaluate": EvaluateConfig(ruler=RulerConfig(lengths=LENGTHS, samples=SAMPLES)),
    }
    return StageConfig(
        section=ReportConfig(**{"title": "Hybrid base<model>", **section}),
        model=ModelConfig(path="recipes/tiny/base<model>"),
        seed=17,
        runtime=Runtime(),
        upstream={stage: sections[stage] for stage in inputs if stage in sections},
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


def _search(folder: Path, layers: int, heads: int, rng: random.Random) -> None:
    _mask_file(layers, heads).save(folder / HEAD_MASK)
    trace: list[dict[str, Any]] = []
    _evaluate_subproblem(trace, "anchors", "all sliding", [0.02])
    _evaluate_subproblem(trace, "anchors", "all full", [1.0])
    for layer in reversed(range(layers)):
        mean = 0.6 + 0.35 * layer / layers
        _evaluate_subproblem(trace, "layer_importance", f"layer {layer}", _scores(rng, mean, 28))
    for group in range(3):
        mean = 0.8 - 0.2 * group
        _evaluate_subproblem(trace, "head_selection", f"group {group}", _scores(rng, mean, 50))
    _evaluate_subproblem(trace, "final", "final mask", [0.92])
    summary = {
        "anchors": {"all_sliding": 0.02, "all_full": 1.0},
        "best_score": 0.92, "best_log_likelihood": -0.41, "evaluations": len(trace),
        "model_seconds": 171.0, "solver_seconds": 4.0, "full_forward_equivalents": 143.2,
        "layer_importance": [],
        "trace": trace, "notes": ["Algorithm 1: 2 layers tie at score 1."],
    }  # fmt: skip
    SearchSummary.model_validate(summary).write(folder)


def _mask_file(layers: int, heads: int) -> HeadMaskFile:
    mask = sliding_mask(sliding_heads(layers, heads), heads, Window(128))
    return HeadMaskFile(mask, "base", "bosch", 0.92, 17)


def _scores(rng: random.Random, mean: float, count: int) -> list[float]:
    return [min(1.0, max(0.0, round(rng.gauss(mean, 0.15) * 24) / 24)) for _ in range(count)]


def _evaluate_subproblem(
    trace: list[dict[str, Any]], phase: str, name: str, scores: list[float]
) -> None:
    best = 0.0
    for score in scores:
        best = max(best, score)
        trace.append(
            {
                "phase": phase, "step": len(trace) + 1, "subproblem": name, "score": score,
                "log_likelihood": -0.2 - 9 * (1 - score), "best_score": best, "mask": "",
            }
        )  # fmt: skip


def _materialize(folder: Path, layers: int, heads: int) -> None:
    total = layers * heads
    summary = {
        "parameters": 7_345_920,
        "kv_cache_bytes_per_token_before": total * BYTES_PER_HEAD,
    }
    MaterializeSummary.model_validate(summary).write(folder)
    (folder / MODEL).mkdir()
    _mask_file(layers, heads).save(folder / MODEL / HEAD_MASK)
    config = {
        "model_type": "qwen3", "max_position_embeddings": 2048, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": BYTES_PER_HEAD // 8,
        "layer_types": ["full_attention"] * layers,
    }  # fmt: skip
    (folder / MODEL / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _measure(folder: Path) -> None:
    """Faster at 2,048 tokens than at 512; all figures differ."""
    points = []
    figures = {"prefill_tokens_per_second": 100.0, "decode_tokens_per_second": 10.0,
               "memory_peak_bytes": 2**20, "kv_cache_bytes": 2**10}  # fmt: skip
    for length, times in ((512, (1.0, 1.25, 0.875, 0.5)), (2048, (1.5, 2.5, 0.75, 0.25))):
        place = {"length": length, "out_of_memory": False}
        points.append({"model": "original", **place, **figures})
        over = dict(zip(figures, times, strict=True))
        own = {name: over[name] * value for name, value in figures.items()}
        points.append({"model": "hybrid", **place, **own, "over_original": over})
    hardware = {"device": "cuda", "gpu": "some GPU"}
    Efficiency.model_validate({"points": points, "hardware": hardware}).write(folder)


def _train(folder: Path, rng: random.Random) -> None:
    lines = []
    for step in range(1, 201):
        loss = 2.1 + 0.9 * math.exp(-step / 40) + rng.gauss(0, 0.04)
        lines.append(
            {
                "step": step, "tokens": step * 20_000, "loss": loss, "learning_rate": 1e-4,
                "grad_norm": 1.0, "seconds": float(step),
            }
        )  # fmt: skip
    Journal(folder / METRICS).append(*lines)


def evaluate(folder: Path, *models: str, averages: Mapping[str, float] = AVERAGES) -> None:
    """Write scores.json and samples.jsonl of these models, with their averages."""
    answers = {name: _answers(averages[name]) for name in models}
    base = cells(answers[ORIGINAL])
    checkpoints = {
        name: {"ruler": suite_table(cells(found), base if name != ORIGINAL else None)}
        for name, found in answers.items()
    }
    original = [[3.0, 2.5, 2.0], [2.8, 2.4, 1.9], [2.9, 2.3, 1.8]] * 2
    more = [[0.0, 0.1, 0.2], [0.0, 0.1, 0.25], [0.0, 0.05, 0.21]] * 2

    def losses(times: int) -> list[list[float]]:
        """Losses of a model whose difference to the original is `times` the first model's."""
        return [
            [a + times * b for a, b in zip(*rows, strict=True)]
            for rows in zip(original, more, strict=True)
        ]

    positions = {
        name: position_table(8, losses(len(models) - number), original)
        if number
        else position_table(8, original, None)
        for number, name in enumerate(models)
    }
    content = {"checkpoints": checkpoints, "positions": positions, "corpus": CORPUS}
    Scores.model_validate(content).write(folder)
    if len(models) > 1:  # the original's scores come from its own stage
        del answers[ORIGINAL]
    lines = (json.dumps(record) + "\n" for record in _records(answers))
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")


def cells(scores: Mapping[tuple[str, int], list[float]]) -> Cells:
    """Records of a model by task and length, for its table."""
    return {
        key: [{"score": value, "scores": {"acc,none": value}} for value in values]
        for key, values in scores.items()
    }


def _records(
    answers: Mapping[str, Mapping[tuple[str, int], list[float]]],
) -> Iterator[dict[str, Any]]:
    for name, subtasks in answers.items():
        for (task, length), scores in subtasks.items():
            for index, score in enumerate(scores):
                yield {
                    "checkpoint": name, "suite": "ruler", "task": task, "length": length,
                    "index": index, "score": score, "answers": ["1234567"],
                    "question": "What is <it>?", "output": "",
                }  # fmt: skip


def _answers(average: float) -> dict[tuple[str, int], list[float]]:
    """Samples with this mean score over subtasks; no two subtasks have the same."""
    places = [(task, length) for task in TASKS for length in LENGTHS]
    right = {
        place: round(SAMPLES * average / 100) + number - len(places) // 2
        for number, place in enumerate(places)
    }
    return {place: [1.0] * n + [0.0] * (SAMPLES - n) for place, n in right.items()}
