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
    ("qwen3_14b_r075", "h100x16", ()),
    ("qwen3_30b_a3b_r075", "h200x8", ("train.teacher=original",)),
    ("qwen3_8b_r075", "a800x16", (
        "train.teacher=original", "runtime.checkpointing=attention",
        "search.sinks=4", "measure={lengths: [4k, 32k], batch_size: 2}",
    )),
    ("qwen3_1p7b_r075", "cpux999", (
        "search.method=apl", "train=null", "evaluate={ruler: {samples: 9}}",
        "model.dtype=float32", "runtime.processes=4",
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
