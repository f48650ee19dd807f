"""Tokens of training that bring back 90 and 99 % of a lost needle score, with and without teacher.

python -m tests.benchmarks.distillation FOLDER [SEED ...]

The quickstart's model with whole layers made sliding (intr, rho = 0.75), which loses most of its
score. Every variant reads the same tokens in the same order, at the quickstart's learning rate; the
score is that of samples neither search nor training has seen. Finished runs in FOLDER are used.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bosch.model.loading import load_model
from pipeline.recipe.load import ROOT
from stages.artifacts import MODEL, read_metrics
from stages.configs import (
    CalibrationConfig,
    MaterializeConfig,
    ModelConfig,
    PrepareConfig,
    Runtime,
    SourceConfig,
    TrainConfig,
)
from stages.context import StageConfig
from stages.train.loss import install_loss
from stages.train.run import run
from stages.train.watch import make_needle_watch

RECIPE = "recipes/quickstart.yaml"
TOKENS, BATCH, EVERY, SAMPLES = 256 * 1024, 8 * 1024, 2, 96
VARIANTS: dict[str, dict[str, Any]] = {
    "cross-entropy": {},
    "KL, all tokens": {"teacher": "original"},
    "KL, a fifth of the tokens": {"teacher": "original", "teacher_tokens": 0.2},
    "KL, attention only": {"teacher": "original", "freeze": "attention_only"},
}


def prepare_and_materialize(folder: Path) -> dict[str, Path]:
    """Outputs of the stages before training, by name."""
    subprocess.run(
        [
            sys.executable, "-m", "pipeline", "run", RECIPE, "--until", "materialize",
            f"runtime.output_root={folder}", "search.method=intr", "prepare.train_tokens=512k",
            "materialize.dtype=float32",
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    return {name: (folder / "quickstart" / name).resolve() for name in ("prepare", "materialize")}


def config_of(seed: int, train: dict[str, Any]) -> StageConfig[TrainConfig]:
    """The quickstart's training with a variant's options."""
    calibration = CalibrationConfig(
        tasks=["niah_single_2", "niah_multikey_1", "niah_multikey_2"], examples=16, length=512
    )
    return StageConfig(
        section=TrainConfig(
            total_tokens=TOKENS, batch_tokens=BATCH, checkpoint_tokens=[], learning_rate=3e-4,
            mixed_precision="no", **train,
        ),
        model=ModelConfig(path="unused"),
        seed=seed,
        runtime=Runtime(needle_every_steps=EVERY, needle_samples=SAMPLES, save_every_steps=10_000),
        upstream={
            "prepare": PrepareConfig(
                sequence_length=1024,
                train_tokens=TOKENS,
                sources=[SourceConfig(name="python", kind="python_docs")],
                calibration=calibration,
            ),
            "materialize": MaterializeConfig(dtype="float32"),
        },
    )  # fmt: skip


def score_of(path: Path, config: StageConfig[TrainConfig], prepared: Path) -> float:
    """Score of a model as it is."""
    model = load_model(path, dtype="float32")
    install_loss(model)
    watch = make_needle_watch(config, prepared)
    assert watch is not None
    return watch.score(model, torch.device("cpu"))


def tokens_to(share: float, lost: float, start: float, steps: list[Any]) -> int | None:
    """Tokens after which that share of the lost score is back; None where it never is."""
    return next(
        (
            step.tokens
            for step in steps
            if step.needle_score is not None and step.needle_score >= start + share * lost
        ),
        None,
    )


def main(folder: Path, seeds: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inputs = prepare_and_materialize(folder)
    reached: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        config = config_of(seed, {})
        original = score_of(ROOT / "recipes/quickstart/base_model", config, inputs["prepare"])
        start = score_of(inputs["materialize"] / MODEL, config, inputs["prepare"])
        for name, options in VARIANTS.items():
            work_dir = folder / f"{name.replace(' ', '-')}-{seed}"
            work_dir.mkdir(exist_ok=True)
            run(config_of(seed, options), inputs, work_dir)
            steps = read_metrics(work_dir)
            result: dict[str, Any] = {
                f"{share:.0%}": tokens_to(share, original - start, start, steps)
                for share in (0.9, 0.99)
            }
            scores = [step.needle_score for step in steps if step.needle_score is not None]
            result |= {"start": start, "original": original, "best": max(scores)}
            reached[name].append(result)
            print(json.dumps({"variant": name, "seed": seed, **result, "scores": scores}))
            sys.stdout.flush()
    for name, results in reached.items():
        for share in ("90%", "99%"):
            counts = [result[share] for result in results]
            known = [count for count in counts if count is not None]
            median = statistics.median(known) if len(known) == len(counts) else None
            print(f"{name:<28} {share}: {counts}, median {median}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
