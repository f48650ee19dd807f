"""What `plan` says of recipes of every kind, line by line.

    python -m tests.golden_plans

writes the golden plans again; look at their diff.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.commands.plan import plan_lines
from pipeline.recipe.load import load_recipe

GOLDEN = Path(__file__).with_name("golden_plans.txt")
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Recipe, hardware, and overrides.
PLANS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("qwen3_1p7b_r075", "h100x8", ()),
    ("llama3p1_8b_r075", "h200x3", (
        "search.method=front", "search.windows=[256,1024]", "search.points=[0.1,0.3,0.5]",

        "runtime.processes=3", "runtime.sharding=none", "train.batch_tokens=3M",
        "runtime.micro_batch_size=1", "runtime.context_parallel=3", "prepare.sequence_length=48k",
        "runtime.needle_every_steps=100", "runtime.needle_samples=50",
    )),
    ("qwen3_8b_r075", "a800x16", (
        "train.lora={rank: 8}", "train.freeze=attention_only", "train.teacher=original",
        "runtime.checkpointing=attention", "evaluate.rivals=[intr,rand]", "search.sinks=4",
        "evaluate.presets=[short]", "materialize.dtype=float32",
        "runtime.processes=8",
        "measure={lengths: [4k, 32k], batch_size: 2}", "rival={method: intr}",
    )),
    ("qwen3_30b_a3b_r075", "a100x7", (
        "search.method=bosch", "search.swa_ratio=null",
        "search.budget={kv_cache: 0.3 @ 64k}",
        "evaluate.harness={tasks: [gsm8k], samples: 100}",
        "evaluate.presets=[long,reasoning]",
    )),
    ("qwen3_30b_a3b_r075", "h200x16", (
        "search.window_size=4k", "runtime.micro_batch_size=1", "evaluate.presets=[long,reasoning]",
        "measure={lengths: [24k], decode_tokens: 8k}", "train.freeze=attention_only",
        "runtime.heldout_every_steps=200", "runtime.heldout_sequences=5",
    )),
    ("qwen3_14b_r075", "h100x8", (
        "search.method=front", "search.swa_ratio=null", "search.head_granularity=2",
        "search.budget={bytes: 6GiB @ 128k}",
        "runtime.sharding=deepspeed",
        "runtime.offload_activations=true",
        "runtime.checkpointing=full", "train.checkpoint_tokens=[]",
    )),
    ("qwen3_1p7b_r075", "cpux999", (
        "search.method=apl", "train=null", "evaluate={harness: {tasks: [gsm8k]}}",
        "model.dtype=float32", "runtime.processes=4",
    )),
    ("qwen3_1p7b_r075", "h100x8", (
        "search.method=front", "train=null", "runtime.eval_batch_size=2",
        "evaluate={needle: null, positions: {documents: 9}}",
    )),
)  # fmt: skip


def plans() -> Iterator[str]:
    """Every plan, below its recipe and overrides."""
    for name, hardware, changes in PLANS:
        loaded = load_recipe(
            RECIPES / f"{name}.yaml", changes, fetch=False, input_files=False, model_files=False,
            env={"CUDA_VISIBLE_DEVICES": ""},  # on any machine
        )  # fmt: skip
        yield " ".join((name, *changes))
        yield from plan_lines(loaded, hardware, 0.3 if changes else None)


def main() -> None:
    GOLDEN.write_text("".join(f"{line}\n" for line in plans()), encoding="utf-8")


if __name__ == "__main__":
    main()
