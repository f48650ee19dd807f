"""Needle score of a trained hybrid: before and after fine-tuning on other text, and repaired.

    python -m tests.benchmarks.repair FOLDER [SEED ...]

The quickstart's trained hybrid is fine-tuned on this project's documentation, at the quickstart's
learning rate and at ten times that rate, without a teacher and in short sequences. Then
`bosch repair` restores the earlier query and key weights, half (the mean of both) and in full.
Needles have the calibration's tasks and length, and no stage has seen them. The loss is over
sequences of the documentation that fine-tuning does not read. Search, training and fine-tuning use
the seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import load_from_disk

from bosch.commands.repair.weights import repair
from bosch.model.loading import load_model
from pipeline.recipe.load import ROOT
from stages.train.loss import install_loss
from stages.train.run import run
from stages.train.stage import checkpoint_name
from tests.benchmarks.distillation import RECIPE, run_stages, score_of, train_config

LENGTH, TUNED, HELD_OUT = 256, 65_536, 16_384  # tokens
TEXT = [
    f"prepare.sequence_length={LENGTH}",
    f"prepare.train_tokens={TUNED + HELD_OUT}",
    f"prepare.sources=[{{name: other, kind: text, path: {ROOT / 'docs/**/*.md'}}}]",
]
TUNE = ["train.teacher=none", f"train.total_tokens={TUNED}", f"train.checkpoint_tokens=[{TUNED}]"]
RATES = ["5e-4", "5e-3"]
WATCH = ["runtime.needle_every_steps=1", "runtime.needle_samples=96"]


def loss_of(model_dir: Path, rows: list[list[int]]) -> float:
    """Mean loss of a token of the rows, in nats."""
    model = load_model(model_dir, dtype="float32").eval()
    install_loss(model)
    with torch.inference_mode():
        losses = [model(input_ids=ids, labels=ids)["loss"] for ids in torch.tensor(rows).split(8)]
    return float(torch.stack(losses).mean())


def main(folder: Path, seeds: list[int]) -> None:
    """Print a row for each seed and rate."""
    folder.mkdir(parents=True, exist_ok=True)
    print(
        "seed, rate: needles and loss on the other text: trained; fine-tuned; repaired, half, whole"
    )
    for seed in seeds:
        seed_override = f"seed={seed}"
        overrides = [seed_override, "rival=null"]
        outputs = run_stages(folder, "train", *overrides, name=f"trained-{seed}")
        text_outputs = run_stages(folder, "prepare", *overrides, *TEXT, name=f"other-{seed}")
        data = load_from_disk(str(text_outputs / "prepare" / "train"))
        tuning_data = folder / f"split-{seed}"
        data.select(range(TUNED // LENGTH)).save_to_disk(str(tuning_data / "train"))
        held_out = data.select(range(TUNED // LENGTH, len(data)))["input_ids"]
        total_tokens = train_config(RECIPE, [seed_override]).section.total_tokens
        trained = (outputs / "train" / "checkpoints" / checkpoint_name(total_tokens)).resolve()
        tuning_start = folder / f"start-{seed}"
        tuning_start.mkdir(exist_ok=True)
        if not (tuning_start / "model").exists():
            (tuning_start / "model").symlink_to(trained)
        needles = train_config(RECIPE, [seed_override, *WATCH])
        for rate in RATES:
            rate_and_seed = f"{rate}-{seed}"
            work = folder / f"tuned-{rate_and_seed}"
            work.mkdir(exist_ok=True)
            run(
                train_config(RECIPE, [seed_override, *TEXT, *TUNE, f"train.learning_rate={rate}"]),
                {"prepare": tuning_data, "materialize": tuning_start},
                work,
            )
            models = {"trained": trained, "tuned": work / "checkpoints" / checkpoint_name(TUNED)}
            for name, share in (("half", 0.5), ("whole", 1.0)):
                models[name] = folder / f"repaired-{name}-{rate_and_seed}"
                if not models[name].exists():
                    repair(models["tuned"], trained, models[name], share)
            rows = [
                f"{score_of(path, needles, outputs / 'prepare'):.3f} {loss_of(path, held_out):.3f}"
                for path in models.values()
            ]
            print(f"{seed}, {rate}: {'; '.join(rows)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [42, 43, 44])
