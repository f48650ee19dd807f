"""A small model with a calibration set that it answers, for the tests of the search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bosch.objective.calibration import CalibrationSet
from stages.context import StageConfig
from tests.hybrid_case import small_model, tokens

WINDOW = 8


def answered_records(model: Any, examples: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Random prompts of several lengths with the model's own greedy answers."""
    records = []
    for index in range(examples):
        prompt = tokens(1, 40 + 3 * index, seed=100 * seed + index)
        answer = 1 + index % 2
        with torch.inference_mode():
            ids = model.generate(prompt, do_sample=False, max_new_tokens=answer)[0]
        records.append({"input_ids": ids.tolist(), "answer_length": answer})
    return records


def searchable(seed: int = 0, examples: int = 6) -> tuple[Any, CalibrationSet]:
    """A model of 3 layers x 4 KV heads that scores 1 with full attention."""
    model = small_model("qwen3", seed)
    records = answered_records(model, examples, seed)
    return model, CalibrationSet.from_records(
        (record["input_ids"], record["answer_length"]) for record in records
    )


def write_inputs(folder: Path, seed: int = 0, examples: int = 6) -> tuple[Path, Path]:
    """A saved model and a prepare directory with its calibration set."""
    model = small_model("qwen3", seed)
    model.save_pretrained(folder / "base")
    calibration = folder / "prepare" / "calibration"
    calibration.mkdir(parents=True)
    lines = [
        json.dumps({"task": "random", "index": i, "seed": seed, **record})
        for i, record in enumerate(answered_records(model, examples, seed))
    ]
    (calibration / "calibration.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "base", folder / "prepare"


def order(
    config: StageConfig, inputs: dict[str, Path], work: Path, function: str
) -> dict[str, Any]:
    """What `pipeline.run.worker` is to do for a stage that needs no section but its own."""

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
