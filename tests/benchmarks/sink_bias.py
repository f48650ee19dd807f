"""Scores of hybrids without sinks, with four sink tokens, and with a learned sink bias.

python -m tests.benchmarks.sink_bias MODEL                       masks without a search
python -m tests.benchmarks.sink_bias MODEL FOLDER [SEED ...]     searched and trained hybrids

MODEL is `quickstart` (window 64) or a composition model of recipes/study (window 32). The first
form prints score and mean log-likelihood of 24 questions under random masks that keep a quarter of
the heads full, one for each seed, and with every head sliding. The second takes the hybrids of
`distillation_study.STUDIES`, the mask found under each variant with the seed: the score is the
exact match of 96 questions of neither search nor training, untrained and after `STEPS` steps of 8
sequences of 208 new tokens, with the original model as teacher.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.objective.sink_bias import give_sink_bias
from bosch.window import SINK_TOKENS, Window
from pipeline.recipe.load import ROOT
from recipes.quickstart.measure_base_model import TASKS, questions
from recipes.study.make_composition_model import examples
from stages.materialize.stage import MODEL
from stages.train.run import run
from stages.train.stage import checkpoint_folders
from tests.benchmarks.distillation_study import (
    STEP_TOKENS,
    STUDIES,
    base_of,
    config_of,
    make_packed,
    save_hybrid,
    score_of,
    searched,
)

STEPS, WINDOW, QUESTIONS, SEEDS = 32, 32, 24, (1, 2, 3)
QUICKSTART = ROOT / "recipes/quickstart/base_model"
VARIANTS = {"none": 0, f"{SINK_TOKENS} sinks": SINK_TOKENS, "bias": 0}


def compare_masks(model: str) -> None:
    """Print a line for each variant: score and log-likelihood of each mask."""
    window, path = WINDOW, base_of(model) if model != "quickstart" else QUICKSTART
    if model == "quickstart":
        window = 64
        calibration = questions(AutoTokenizer.from_pretrained(path), TASKS, 512, QUESTIONS)
    else:
        records = [(r["input_ids"], r["answer_length"]) for r in examples()[:QUESTIONS]]
        calibration = CalibrationSet.from_records(records)
    base: Any = load_model(path, dtype="float32")
    prepare_for_search(base)
    for variant, sinks in VARIANTS.items():
        objective = Objective(base, calibration, Window(window, sinks))
        if variant == "bias":
            give_sink_bias(objective)
        layers, heads = objective.shape
        masks = [HeadMask.all_sliding(layers, heads)]
        for seed in SEEDS:
            bits = np.zeros(layers * heads, dtype=bool)
            bits[np.random.default_rng(seed).permutation(bits.size)[: bits.size // 4]] = True
            masks.append(HeadMask(bits.reshape(layers, heads)))
        results = [objective.evaluate(mask) for mask in masks]
        line = ", ".join(f"{each.score:.2f} ({each.log_likelihood:.2f})" for each in results)
        print(f"{model}, {variant}: {line}", flush=True)


def scores_of(
    folder: Path, model: str, method: str, variant: str, seed: int
) -> tuple[float, float]:
    """Score before and after training."""
    window = Window(WINDOW, VARIANTS[variant])
    base, mask = searched(model, method, window, seed, sink_bias=variant == "bias")
    made = materialize(base, mask, window)
    hybrid = save_hybrid(made, base_of(model), folder / "materialize")
    before, _ = score_of(hybrid / MODEL)
    marks = f"train.checkpoint_tokens=[{STEPS * STEP_TOKENS}]"
    config = config_of(model, seed, STEPS, "train.teacher=original", marks)
    prepared = make_packed(folder.parent / f"prepare-{seed}", seed, STEPS)
    work_dir = folder / "train"
    work_dir.mkdir(exist_ok=True)
    run(config, {"prepare": prepared, "materialize": hybrid}, work_dir)
    (trained,) = checkpoint_folders(work_dir).values()
    return before, score_of(trained)[0]


def main(model: str, folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    print(f"original {score_of(base_of(model))[0]:.3f}", flush=True)
    for method, variant in itertools.product(STUDIES[model], VARIANTS):
        scores = []
        for seed in seeds:
            work = folder / f"{model}-{method}-{variant.replace(' ', '-')}-{seed}"
            scores.append(scores_of(work, model, method, variant, seed))
        before, after = (
            [round(score, 3) for score in column] for column in zip(*scores, strict=True)
        )
        record = {"hybrid": method, "variant": variant, "untrained": before, "trained": after}
        means = {"means": [round(statistics.mean(column), 3) for column in (before, after)]}
        print(json.dumps(record | means), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        compare_masks(sys.argv[1])
    else:
        main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]] or [*SEEDS])
