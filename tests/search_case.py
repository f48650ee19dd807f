"""A small model with a calibration set that it answers, and scores without a model, to search."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.masks import HeadMask
from bosch.score.calibration import CalibrationSet
from bosch.score.evaluation_log import Evaluation, EvaluationContext, EvaluationLog
from bosch.search.evaluator import Evaluator
from data_prep.documents.calibration import Prompt
from stages.context import ModelConfig, Runtime, StageConfig
from stages.search.stage import SearchConfig
from tests.hybrid_case import small_model, tokens
from tests.tiny_data import byte_tokenizer

WINDOW = 8
CONTEXT = EvaluationContext("data", "model", [16], 0)


class Additive:
    """Score = 1 - the costs of the sliding units, or `score` of a mask; records its calls."""

    quantum = 1e-9

    def __init__(self, costs: Any, score: Callable[[HeadMask], float] | None = None) -> None:
        self.costs = np.asarray(costs, dtype=float)
        self.num_layers, self.num_key_value_heads = self.costs.shape
        self.score = score
        self.calls: list[str] = []

    def evaluate(self, mask: HeadMask) -> Evaluation:
        self.calls.append(mask.key)
        lost = float(self.costs[~mask.is_full].sum())
        steps = round(max(0.0, 1.0 - lost) / self.quantum)
        score = self.score(mask) if self.score else steps * self.quantum
        return Evaluation(score, -lost, 0.01, 1.0)


def mask_of_key(key: str) -> HeadMask:
    """The mask with this `key`."""
    rows, _, sinks = key.partition("+")
    windows = tuple(tuple(map(int, row.split(","))) for row in rows.split("/"))
    return HeadMask(windows, int(sinks or 0))


def random_costs(layers: int, heads: int, seed: int, exponent: int = 1) -> np.ndarray:
    """Costs that sum to 1; the higher the exponent, the fewer of them are high."""
    costs = np.random.default_rng(seed).exponential(size=(layers, heads)) ** exponent
    return costs / costs.sum()


def evaluator_of(scorer: Any, path: Path | None = None) -> Evaluator:
    return Evaluator(scorer, EvaluationLog(path, CONTEXT))


def answered_records(model: Any, examples: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Random prompts of several lengths with the model's own greedy answers of other tokens."""
    records = []
    for index in range(examples):
        answer = 1 + index % 2
        for attempt in range(20):  # with equal tokens, a wrong order would go unnoticed
            prompt = tokens(1, 40 + 3 * index, seed=100 * seed + index + 10_000 * attempt)
            with torch.inference_mode():
                ids = model.generate(prompt, do_sample=False, max_new_tokens=answer)[0].tolist()
            if len(set(ids[-answer:])) == answer:
                break
        records.append({"input_ids": ids, "answer_length": answer})
    return records


def answered(model: Any, examples: int = 6, seed: int = 0) -> CalibrationSet:
    """The records as a calibration set."""
    records = answered_records(model, examples, seed)
    return CalibrationSet.from_records((r["input_ids"], r["answer_length"]) for r in records)


def searchable(seed: int = 0, examples: int = 6) -> tuple[Any, CalibrationSet]:
    """A model of 3 layers x 4 KV heads that scores 1 with full attention."""
    model = small_model("qwen3", seed)
    return model, answered(model, examples, seed)


def write_inputs(folder: Path, seed: int = 0, examples: int = 6) -> tuple[Path, Path]:
    """A saved model and a prepare directory with prompts that it answers right."""
    model, tokenizer = small_model("qwen3", seed), byte_tokenizer()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "prepare" / "tokenizer")
    calibration = folder / "prepare" / "calibration"
    calibration.mkdir(parents=True)
    lines = []
    for record in answered_records(model, examples, seed):
        ids, length = record["input_ids"], record["answer_length"]
        answers = [tokenizer.decode(ids[-length:])]
        text = tokenizer.decode(ids[:-length])
        prompt = Prompt("random", len(ids), length, text, "", answers)
        lines.append(json.dumps(asdict(prompt)) + "\n")
    (calibration / "prompts.jsonl").write_text("".join(lines))
    return folder / "base", folder / "prepare"


def config_of(base: Path, section: SearchConfig, **runtime: Any) -> StageConfig:
    """The configuration of a search of a saved model, by default in batches of two."""
    model = ModelConfig(path=str(base), dtype="float32")
    return StageConfig(section, model, 5, Runtime(**{"eval_batch_size": 2, **runtime}))


def order(
    config: StageConfig, inputs: dict[str, Path], work: Path, function: str
) -> dict[str, Any]:
    """The order to `pipeline.run.worker` for a stage that needs only its own section."""

    def typed(section: Any) -> dict[str, Any]:
        return {
            "type": f"{type(section).__module__}:{type(section).__name__}",
            "values": section.model_dump(mode="json"),
        }

    return {
        "stage": function.split(".")[1],
        "function": function,
        "section": typed(config.section),
        "model": typed(config.model),
        "seed": config.seed,
        "runtime": typed(config.runtime),
        "upstream": {},
        "inputs": {name: str(path) for name, path in inputs.items()},
        "work_dir": str(work),
        "log_level": "info",
    }
