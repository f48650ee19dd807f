"""Tokens of training that bring back a lost score of a study model, with and without teacher.

python -m tests.benchmarks.distillation_study FOLDER [SEED ...]

The composition model of 8 x 8 heads, whose questions take up to three look-ups, each by heads of
its own, with window 32: with the heads that bosch_plus chooses (rho = 0.875), and with the layers
that intr does (0.75). Training reads new texts of the model's own kind, 8 sequences of 208 tokens a
step; the score is the exact match of 96 questions of neither search nor training, at checkpoints
every 8 steps.
"""

from __future__ import annotations

import itertools
import json
import shutil
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
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from bosch.window import Window
from data_prep.packing import Packed, write_dataset
from pipeline.recipe.load import ROOT
from recipes.study.make_composition_model import (
    BATCH,
    KINDS,
    LENGTH,
    exact_match,
    examples,
    training_batch,
)
from stages.artifacts import MODEL, PACKED_DATA, checkpoint_folders, checkpoint_tokens
from stages.configs import TrainConfig
from stages.context import StageConfig
from stages.train.run import run
from tests.benchmarks.distillation import print_medians, tokens_to, train_config

RECIPE = "recipes/study/composition_8x8.yaml"
BASE = ROOT / "recipes/study/composition_8x8"
STEPS, EVERY, QUESTIONS = 128, 8, 96
STEP_TOKENS, WINDOW = BATCH * LENGTH, Window(32)
VARIANTS = {"cross-entropy": "none", "KL, all tokens": "original"}
HYBRIDS = {"bosch_plus": 0.875, "intr": 0.75}


def config_of(seed: int, teacher: str) -> StageConfig[TrainConfig]:
    """Training at the rate that the model was made with."""
    marks = ",".join(str(step * STEP_TOKENS) for step in range(EVERY, STEPS + 1, EVERY))
    return train_config(RECIPE, [
        f"seed={seed}", "materialize.dtype=float32", f"prepare.sequence_length={LENGTH}",
        f"prepare.train_tokens={STEPS * STEP_TOKENS}", f"train.total_tokens={STEPS * STEP_TOKENS}",
        f"train.batch_tokens={STEP_TOKENS}", "train.learning_rate=1e-3", "train.warmup_ratio=0.1",
        "train.mixed_precision=no", f"train.teacher={teacher}",
        f"train.checkpoint_tokens=[{marks}]",
    ])  # fmt: skip


def find_mask(method: str, ratio: float) -> HeadMask:
    """The mask of a method by its name, on 64 questions that are not scored."""
    model: Any = load_model(BASE, dtype="float32")
    prepare_for_search(model)
    records = ((r["input_ids"], r["answer_length"]) for r in examples()[:64])
    objective = Objective(model, CalibrationSet.from_records(records), WINDOW)
    return run_method(method, objective, SearchSettings(ratio, budget_per_layer=8, seed=5)).mask


def make_inputs(folder: Path, method: str, seed: int) -> dict[str, Path]:
    """Packed sequences of new texts, and the hybrid model."""
    prepared, materialized = folder / f"prepare-{seed}", folder / f"materialize-{method}"
    if not prepared.exists():
        first = 100_000 * (seed + 1)  # far from the steps that made the model
        rows = (row for step in range(STEPS) for row in training_batch(first + step)[0])
        packed = (Packed(row.numpy().astype(np.int32), [LENGTH]) for row in rows)
        write_dataset(prepared / PACKED_DATA, packed, STEPS * BATCH, LENGTH)
    if not materialized.exists():
        base = load_model(BASE, dtype="float32")
        mask = find_mask(method, HYBRIDS[method])
        materialize(base, mask, WINDOW).save_pretrained(materialized / MODEL)
        for file in BASE.glob("tokenizer*.json"):
            shutil.copy(file, materialized / MODEL)
    return {"prepare": prepared, "materialize": materialized}


def score_of(path: Path) -> float:
    """Exact match over the held-out questions of all kinds."""
    model, records = load_model(path, dtype="float32"), examples()[-QUESTIONS:]
    return sum(exact_match(model, records, kind) for kind in range(KINDS)) / KINDS


def recover(folder: Path, method: str, name: str, seed: int, original: float) -> dict[str, Any]:
    """Train one hybrid; its scores, and the tokens after which 90 and 99 % are back."""
    inputs = make_inputs(folder, method, seed)
    start = score_of(inputs["materialize"] / MODEL)
    work_dir = folder / f"{method}-{VARIANTS[name]}-{seed}"
    work_dir.mkdir(exist_ok=True)
    run(config_of(seed, VARIANTS[name]), inputs, work_dir)
    scores = {
        checkpoint_tokens(checkpoint) or 0: score_of(path)
        for checkpoint, path in checkpoint_folders(work_dir).items()
    }
    lost = original - start
    result = {f"{share:.0%}": tokens_to(share, lost, start, scores) for share in (0.9, 0.99)}
    return {"hybrid": method, "variant": name, "seed": seed, "start": start} | {
        **result,
        "scores": [round(score, 3) for score in scores.values()],
    }


def main(folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    original = score_of(BASE)
    print(f"original {original:.3f}")
    reached: dict[str, list[dict[str, Any]]] = {}
    for method, name in itertools.product(HYBRIDS, VARIANTS):
        for seed in seeds:
            result = recover(folder, method, name, seed, original)
            print(json.dumps(result), flush=True)
            reached.setdefault(f"{method}, {name}", []).append(result)
    print_medians(reached)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
