"""Training tokens that bring 90 and 99 % of a lost needle score back, with and without teacher.

python -m tests.benchmarks.distillation FOLDER [SEED ...]

The quickstart's model with whole layers made sliding (intr, rho = 0.875, W = 64), which loses most
of its score. Every variant reads the same tokens in the same order, 128 steps of 2,048; it is
scored on samples that neither search nor training has seen. Finished runs in FOLDER are reused.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bosch.model.loading import load_model
from pipeline.recipe.load import ROOT, load_recipe
from stages.context import StageConfig
from stages.materialize.stage import MODEL
from stages.train.loss import install_loss
from stages.train.run import run
from stages.train.stage import TrainConfig, read_metrics
from stages.train.watch import make_needle_watch

RECIPE = "recipes/quickstart.yaml"
TOKENS = 128 * 2048
# The settings of the table in docs/notes/benchmarks.md, whatever today's quickstart has.
SETTINGS = [
    "search.method=intr", "search.swa_ratio=0.875", "search.window_size=64", "search.points=null",
    "prepare.sources=[{name: python, kind: python_docs, weight: 0.15}, "
    "{name: retrieval, kind: retrieval, weight: 0.85}]",
    f"prepare.train_tokens={TOKENS}", f"train.total_tokens={TOKENS}", "train.batch_tokens=2048",
    "train.learning_rate=1e-3", "train.checkpoint_tokens=[]",
]  # fmt: skip
WATCH = ["runtime.needle_every_steps=8", "runtime.needle_samples=48"]
VARIANTS: dict[str, list[str]] = {
    "cross-entropy": ["train.teacher=none"],
    "KL, all tokens": [],
    "KL, a fifth of the tokens": ["train.teacher_tokens=0.2"],
    "KL, attention only": ["train.freeze=attention_only"],
}


def run_stages(folder: Path, until: str, *overrides: str, name: str = "quickstart") -> Path:
    """Run the quickstart with these overrides up to a stage; returns the folder of its outputs."""
    subprocess.run(
        [
            sys.executable, "-m", "pipeline", "run", RECIPE, "--until", until, f"name={name}",
            f"runtime.output_root={folder}", *overrides,
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    return folder / name


def config_of(seed: int, variant: list[str]) -> StageConfig[TrainConfig]:
    """The options of the stage train in one variant."""
    return train_config(RECIPE, [f"seed={seed}", *SETTINGS, *WATCH, *variant])


def train_config(recipe_file: str, overrides: list[str]) -> StageConfig[TrainConfig]:
    """The options of the stage train in a recipe with these overrides."""
    recipe = load_recipe(ROOT / recipe_file, overrides, fetch=False).recipe
    return StageConfig(
        section=recipe.train,
        model=recipe.model,
        seed=recipe.seed,
        runtime=recipe.runtime,
        upstream={"prepare": recipe.prepare, "materialize": recipe.materialize},
    )


def score_of(path: Path, config: StageConfig[TrainConfig], prepared: Path) -> float:
    """Needle score of a model."""
    model = load_model(path, dtype="float32")
    install_loss(model)
    return make_needle_watch(config, prepared).score(model, torch.device("cpu"))


def tokens_back(original: float, start: float, scores: Mapping[int, float]) -> dict[str, Any]:
    """Tokens after which 90 and 99 % of the lost score are back; None where they never are.

    `scores` holds the score by tokens, in ascending order.
    """
    back = {}
    for share in (0.9, 0.99):
        enough = start + share * (original - start) - 1e-9  # equal up to rounding is enough
        back[f"{share:.0%}"] = next((at for at, score in scores.items() if score >= enough), None)
    return back


def main(folder: Path, seeds: list[int]) -> None:
    """Print a line for each variant and seed, then the medians if every seed has its score back."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = run_stages(folder, "materialize", *SETTINGS)
    inputs = {name: (outputs / name).resolve() for name in ("prepare", "materialize")}
    reached: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        config = config_of(seed, [])
        original = score_of(ROOT / "recipes/quickstart/base_model", config, inputs["prepare"])
        start = score_of(inputs["materialize"] / MODEL, config, inputs["prepare"])
        for name, results in reached.items():
            work_dir = folder / f"{name.replace(' ', '-')}-{seed}"
            work_dir.mkdir(exist_ok=True)
            run(config_of(seed, VARIANTS[name]), inputs, work_dir)
            scores = {
                step.tokens: step.needle_score
                for step in read_metrics(work_dir)
                if step.needle_score is not None
            }
            result = tokens_back(original, start, scores)
            result |= {"start": start, "original": original, "best": max(scores.values())}
            results.append(result)
            line = {"variant": name, "seed": seed, **result, "scores": [*scores.values()]}
            print(json.dumps(line), flush=True)
    for name, results in reached.items():
        for share in ("90%", "99%"):
            counts = [result[share] for result in results]
            median = None if None in counts else statistics.median(counts)
            print(f"{name:<28} {share}: {counts}, median {median}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
