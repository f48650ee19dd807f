"""Tokens of training that bring back a lost score of a study model, with and without teacher.

python -m tests.benchmarks.distillation_study MODEL FOLDER [SEED ...]

MODEL is a composition model of recipes/study, whose questions take up to three look-ups, each by
heads of its own, with window 32. Its hybrids are those of `STUDIES`: heads that a search or a
ranking chooses, or whole layers. Training reads new texts of the model's own kind, 8 sequences of
208 tokens a step; the score is the exact match of 96 questions of neither search nor training, at
checkpoints every 8 steps.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.objective.sink_bias import give_sink_bias
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from bosch.window import Window
from data_prep.documents.packing import Packed, write_dataset
from pipeline.recipe.load import ROOT
from recipes.study.make_composition_model import (
    BATCH,
    KINDS,
    LENGTH,
    exact_match,
    examples,
    training_batch,
)
from stages.context import StageConfig
from stages.materialize.stage import MODEL
from stages.prepare.stage import PACKED_DATA
from stages.train.run import run
from stages.train.stage import TrainConfig, checkpoint_folders, checkpoint_tokens
from tests.benchmarks.distillation import print_medians, tokens_back, train_config

STEPS, EVERY, QUESTIONS = 128, 8, 96
STEP_TOKENS, WINDOW = BATCH * LENGTH, Window(32)
VARIANTS = {"cross-entropy": "none", "KL, all tokens": "original"}
# For each model the methods and their ratios.
STUDIES = {
    "composition_8x8": {"bosch_plus": 0.875, "intr": 0.75},
    "composition_12x4": {"bosch_plus": 0.875, "razor": 0.75},
}


def base_of(model: str) -> Path:
    """The model that is made hybrid."""
    return ROOT / "recipes/study" / model


def config_of(model: str, seed: int, steps: int, *changes: str) -> StageConfig[TrainConfig]:
    """Training at the rate that the model was made with."""
    return train_config(f"recipes/study/{model}.yaml", [
        f"seed={seed}", "materialize.dtype=float32", f"prepare.sequence_length={LENGTH}",
        f"prepare.train_tokens={steps * STEP_TOKENS}", f"train.total_tokens={steps * STEP_TOKENS}",
        f"train.batch_tokens={STEP_TOKENS}", "train.learning_rate=1e-3", "train.warmup_ratio=0.1",
        "train.mixed_precision=no", *changes,
    ])  # fmt: skip


def searched(
    model: str, method: str, window: Window = WINDOW, seed: int = 5, sink_bias: bool = False
) -> tuple[Any, HeadMask]:
    """The model and its mask by a method, found on 64 questions that are not scored."""
    base: Any = load_model(base_of(model), dtype="float32")
    prepare_for_search(base)
    records = ((r["input_ids"], r["answer_length"]) for r in examples()[:64])
    objective = Objective(base, CalibrationSet.from_records(records), window)
    if sink_bias:
        give_sink_bias(objective)
    settings = SearchSettings(STUDIES[model][method], budget_per_layer=8, seed=seed)
    return base, run_method(method, objective, settings).mask


def make_inputs(folder: Path, model: str, method: str, seed: int) -> dict[str, Path]:
    """Packed sequences of new texts, and the hybrid model."""
    prepared = make_packed(folder / f"prepare-{seed}", seed, STEPS)
    materialized = folder / f"materialize-{method}"
    if not materialized.exists():
        hybrid = materialize(*searched(model, method), WINDOW)
        save_hybrid(hybrid, base_of(model), materialized)
    return {"prepare": prepared, "materialize": materialized}


def make_packed(prepared: Path, seed: int, steps: int) -> Path:
    """Packed sequences of new texts for so many steps."""
    if not prepared.exists():
        first = 100_000 * (seed + 1)  # far from the steps that made the model
        rows = (row for step in range(steps) for row in training_batch(first + step)[0])
        packed = (Packed(row.numpy().astype(np.int32), [LENGTH], [0]) for row in rows)
        write_dataset(prepared / PACKED_DATA, packed, steps * BATCH, LENGTH)
    return prepared


def save_hybrid(hybrid: Any, base: Path, materialized: Path) -> Path:
    """A hybrid as `materialize` leaves it, with its base's tokenizer."""
    hybrid.save_pretrained(materialized / MODEL)
    for file in base.glob("tokenizer*.json"):
        shutil.copy(file, materialized / MODEL)
    return materialized


def score_of(path: Path) -> tuple[float, list[float]]:
    """Exact match over the held-out questions, and of one, two and three look-ups."""
    model, records = load_model(path, dtype="float32"), examples()[-QUESTIONS:]
    by_kind = [exact_match(model, records, kind) for kind in range(KINDS)]
    return statistics.mean(by_kind), [round(score, 3) for score in by_kind]


def recover(
    folder: Path, model: str, method: str, name: str, seed: int, original: float
) -> dict[str, Any]:
    """Train one hybrid; its scores, and the tokens after which 90 and 99 % are back."""
    inputs = make_inputs(folder, model, method, seed)
    start, kinds_before = score_of(inputs["materialize"] / MODEL)
    work_dir = folder / f"{method}-{VARIANTS[name]}-{seed}"
    work_dir.mkdir(exist_ok=True)
    marks = ",".join(str(step * STEP_TOKENS) for step in range(EVERY, STEPS + 1, EVERY))
    teacher = f"train.teacher={VARIANTS[name]}"
    config = config_of(model, seed, STEPS, teacher, f"train.checkpoint_tokens=[{marks}]")
    run(config, inputs, work_dir)
    scores = {}
    for checkpoint, path in checkpoint_folders(work_dir).items():
        scores[checkpoint_tokens(checkpoint) or 0], kinds_after = score_of(path)
    return {"hybrid": method, "variant": name, "seed": seed, "start": start} | {
        **tokens_back(original, start, scores),
        "scores": [round(score, 3) for score in scores.values()],
        "look-ups": {"before": kinds_before, "after": kinds_after},
    }


def main(model: str, folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    original, _ = score_of(base_of(model))
    print(f"original {original:.3f}")
    reached: dict[str, list[dict[str, Any]]] = {}
    for method, name in itertools.product(STUDIES[model], VARIANTS):
        for seed in seeds:
            result = recover(folder, model, method, name, seed, original)
            print(json.dumps(result), flush=True)
            reached.setdefault(f"{method}, {name}", []).append(result)
    print_medians(reached)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]] or [1, 2, 3])
