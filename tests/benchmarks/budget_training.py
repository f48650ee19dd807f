"""Scores of four budgets after one training for all of them, beside trainings of their own.

python -m tests.benchmarks.budget_training MODEL FOLDER [STEPS [SEED ...]]

MODEL is composition_8x8 of recipes/study, or quickstart. The budgets are nested masks with one
window: the shipped mask with the most sliding heads, whose full heads of the smallest gate
gradients then slide too. All trainings distil from the full-attention model and read the same
tokens in the same order: one of STEPS steps for all budgets (`train.budgets: all`), for each budget
one of STEPS and one of a quarter of them. Scores are those of samples that neither search nor
training has seen, the answer given, with 95 % intervals. Finished trainings in FOLDER are used.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.analysis.intervals import Interval, share
from bosch.front import Front, FrontPoint
from bosch.heads import HeadMask, HeadMaskFile
from bosch.model.loading import load_model
from bosch.model.materialize import materialize_front
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.window import Window
from data_prep.documents.packing import Packed, write_dataset
from pipeline.recipe.load import ROOT
from recipes.study.make_composition_model import (
    BATCH,
    EXAMPLES,
    KINDS,
    LENGTH,
    exact_match,
    examples,
    training_batch,
)
from stages.context import StageConfig
from stages.materialize.stage import MODEL
from stages.pages.tables import Table
from stages.prepare.stage import CALIBRATION, PACKED_DATA
from stages.train.loss import install_loss
from stages.train.run import run
from stages.train.stage import TrainConfig, checkpoint_folders
from stages.train.watch import make_needle_watch
from tests.benchmarks.distillation import RECIPE, run_stages, train_config


class Composition:
    """Questions of one, two and three look-ups, each by different heads."""

    name = "composition_8x8"
    base = ROOT / "recipes/study" / name
    mask = ROOT / "recipes/masks" / name / "bosch_plus-0.875.json"
    window = Window(32)
    context = LENGTH
    full_heads = (8, 4, 2, 1)  # of the budgets
    questions = 384

    def prepared(self, folder: Path, seed: int, steps: int) -> Path:
        """The folder with packed sequences of new texts, and a calibration set if needed."""
        prepared = folder / f"prepare-{seed}"
        if not prepared.exists():
            first = 100_000 * (seed + 1)  # far from the steps that made the model
            rows = (row for step in range(steps) for row in training_batch(first + step)[0])
            packed = (Packed(row.numpy().astype(np.int32), [LENGTH], [0]) for row in rows)
            write_dataset(prepared / PACKED_DATA, packed, steps * BATCH, LENGTH)
        return prepared

    def calibration(self, prepared: Path) -> CalibrationSet:
        """The examples for gradients of the gates."""
        records = examples()[:64]
        return CalibrationSet.from_records((r["input_ids"], r["answer_length"]) for r in records)

    def config(self, seed: int, overrides: list[str]) -> StageConfig[TrainConfig]:
        """With the learning rate of the model's own training."""
        return train_config(f"recipes/study/{self.name}.yaml", [
            f"seed={seed}", "materialize.dtype=float32", f"prepare.sequence_length={LENGTH}",
            "prepare.train_tokens=1B", "train.total_tokens=1B", "train.checkpoint_tokens=[]",
            f"train.batch_tokens={BATCH * LENGTH}", "train.learning_rate=1e-3",
            "train.warmup_ratio=0.1", "train.mixed_precision=no", *overrides,
        ])  # fmt: skip

    def score(self, model: Any, prepared: Path) -> Interval:
        """Share of the samples whose answers are all right."""
        records = examples(EXAMPLES + self.questions)[EXAMPLES:]
        by_kind = [exact_match(model, records, kind) for kind in range(KINDS)]
        return share(statistics.mean(by_kind), self.questions)


class Quickstart:
    """Needles in Python's documentation, at the length of the recipe's calibration set."""

    base = ROOT / "recipes/quickstart/base_model"
    mask = ROOT / "recipes/masks/quickstart/bosch_plus-0.875.json"
    window = Window(64)
    context = 1024
    full_heads = (6, 4, 2, 1)
    samples = 96

    def prepared(self, folder: Path, seed: int, steps: int) -> Path:
        output = folder / "quickstart" / "prepare"
        if not output.exists():
            run_stages(folder, "prepare")
        return output.resolve()

    def calibration(self, prepared: Path) -> CalibrationSet:
        return CalibrationSet.load(prepared / CALIBRATION)

    def config(self, seed: int, overrides: list[str]) -> StageConfig[TrainConfig]:
        return train_config(RECIPE, [f"seed={seed}", "train.checkpoint_tokens=[]", *overrides])

    def score(self, model: Any, prepared: Path) -> Interval:
        watch = _watch(self, prepared)
        install_loss(model)
        return share(watch.score(model, torch.device("cpu")), self.samples)


@functools.cache
def _watch(study: Quickstart, prepared: Path) -> Any:
    watched = ["runtime.needle_every_steps=8", f"runtime.needle_samples={study.samples}"]
    return make_needle_watch(study.config(0, watched), prepared)


Study = Composition | Quickstart
STUDIES: dict[str, Study] = {"composition_8x8": Composition(), "quickstart": Quickstart()}


def nested_front(study: Study, prepared: Path) -> Front:
    """The shipped mask and masks within it, made head by head with a new gradient each."""
    base = load_model(study.base, dtype="float32")
    prepare_for_search(base)
    objective = Objective(base, study.calibration(prepared), study.window)
    mask = HeadMaskFile.load(study.mask).mask
    assert mask.is_full.sum() == study.full_heads[0]
    points = []
    while True:
        count = int(mask.is_full.sum())
        if count in study.full_heads:
            found = objective.evaluate(mask)
            points.append(
                FrontPoint.of(
                    mask, study.window, study.context,
                    score=found.score, log_likelihood=found.log_likelihood,
                )
            )  # fmt: skip
        if count == min(study.full_heads):
            break
        gain = torch.tensor(objective.gate_gradient(mask).values)
        gain[~torch.tensor(mask.is_full)] = torch.inf
        bits = mask.is_full.copy()
        bits.flat[int(gain.argmin())] = False
        mask = HeadMask(bits)
    front = Front.of(points, study.window, study.context, model=str(study.base))
    return replace(front, chosen=len(front.points) - 1)


def trained(
    study: Study, folder: Path, name: str, seed: int, steps: int, overrides: list[str]
) -> Path:
    """The model after a training; a finished one is reused."""
    prepared, work_dir = study.prepared(folder, seed, steps), folder / f"{name}-{seed}"
    work_dir.mkdir(exist_ok=True)
    tokens = steps * study.config(seed, []).section.batch_tokens
    config = study.config(seed, [
        f"train.total_tokens={tokens}", "train.checkpoint_tokens=[]", "train.teacher=original",
        "train.warmup_ratio=0.1", "search.method=front", *overrides,
    ])  # fmt: skip
    run(config, {"prepare": prepared, "materialize": folder / "materialize"}, work_dir)
    return next(iter(checkpoint_folders(work_dir).values()))


def rows_of(study: Study, folder: Path, seed: int, steps: int) -> list[list[str]]:
    """For each budget the scores before, after one training for all, and after its own."""
    prepared = study.prepared(folder, seed, steps)
    hybrid = folder / "materialize" / MODEL
    if not hybrid.exists():
        front = nested_front(study, prepared)
        base = load_model(study.base, dtype="float32")
        materialize_front(base, front).save_pretrained(hybrid)
        for file in study.base.glob("tokenizer*.json"):
            shutil.copy(file, hybrid)
        front.save(hybrid / "front.json")
    front = Front.load(hybrid / "front.json")
    shared = trained(study, folder, f"shared-{steps}", seed, steps, ["train.budgets=all"])
    original = study.context * front.num_layers * front.num_key_value_heads
    rows = []
    for point in front.points:
        cells = [_score(study, path, prepared, point.kv_slots) for path in (hybrid, shared)]
        for count in (steps, steps // 4):
            name, budget = f"own-{point.full_kv_heads}-{count}", f"[{point.kv_slots}]"
            own = trained(study, folder, name, seed, count, [f"train.budgets={budget}"])
            cells.append(_score(study, own, prepared, point.kv_slots))
        size = f"{point.kv_slots:,} ({point.kv_slots / original:.1%})"
        rows.append([str(seed), size, str(point.full_kv_heads), *cells])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def _score(study: Study, path: Path, prepared: Path, budget: int) -> str:
    mean, low, high = study.score(load_model(path, dtype="float32", kv_budget=budget), prepared)
    return f"{mean:.3f} ({low:.2f}–{high:.2f})"


def main(name: str, folder: Path, steps: int, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    study = STUDIES[name]
    rows = [row for seed in seeds for row in rows_of(study, folder, seed, steps)]
    tokens = steps * study.config(0, []).section.batch_tokens
    header = ["seed", "KV slots", "full heads", "untrained", f"all budgets, {tokens:,} tokens",
              f"alone, {tokens:,}", f"alone, {tokens // 4:,}"]  # fmt: skip
    print(Table.of_rows(f"{name}, 95 % intervals", header, rows).markdown())


if __name__ == "__main__":
    arguments = sys.argv[3:] or ["64"]
    main(sys.argv[1], Path(sys.argv[2]), int(arguments[0]), [int(s) for s in arguments[1:]] or [1])
