"""Run the whole pipeline with options that are drawn together, from a seed.

    python -m tests.tools.combinations --cases 40 --seed 1 --folder F

Each case takes some of the alternatives below as overrides of a tiny recipe. One that the recipe's
checks refuse is counted; every other has to run to its end. Prints a line for each case, with the
end of what it said where it stopped, and exits 1 where one did. `F/<number>.txt` has the overrides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from bosch.search.methods import METHODS
from tests.hybrid_case import small_model
from tests.tiny_data import tiny_tokenizer
from tests.tools.soak import ROOT, recipe

_SECONDS = 600
_RIVALS = [name for name, method in METHODS.items() if method.kind in ("layer rule", "ranking")]
# Random models: they answer nothing that a search could go by.
_FAMILIES = (
    "cohere2", "falcon_h1", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral",
    "olmo2", "phi3", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip

# How often a case has one of some alternatives, each the overrides that belong together.
_OPTIONS: list[tuple[float, list[list[str]]]] = [
    (0.3, [["model.dtype=bfloat16"]]),
    (0.5, [["search.window_size=16"], ["search.window_size=48"]]),
    (0.5, [["search.sinks=1"], ["search.sinks=4"]]),
    (0.5, [
        ["search.swa_ratio=0.75"], ["search.swa_ratio=0.6"],
        ["search.swa_ratio=null", "search.budget.kv_cache=0.5 @ 1k"],
        ["search.swa_ratio=null", "search.budget.bytes=400KiB @ 1k"],
    ]),
    (0.3, [[f"search.solver={name}"] for name in ("nomad_penalty", "one_plus_one")]),
    (0.2, [["search.strict=true"], ["search.race=true"]]),
    (0.2, [["search.head_granularity=2"]]),
    (0.4, [["materialize.dtype=bfloat16"], ["materialize.max_shard_size=200KB"]]),
    (0.2, [["train=null"]]),
    (0.4, [["train.mixed_precision=bf16"]]),
    (0.3, [["train.document_masking=true"]]),
    (0.4, [["train.teacher=original"], ["train.teacher=original", "train.teacher_tokens=0.3"],
           ["train.teacher=original", "train.teacher_weight=0.5"]]),
    (0.3, [["train.freeze=attention_only"], ["train.lora.rank=4"]]),
    (0.2, [["train.optimizer=adamw_8bit"]]),
    (0.2, [["train.bad_steps=skip", "train.spike_factor=3"], ["train.averaged_checkpoints=2"]]),
    (0.3, [[f"rival.method={name}"] for name in _RIVALS]),
    (0.4, [[f"evaluate.rivals=[{name}]"] for name in _RIVALS]),
    (0.2, [["evaluate.windows=[8, 24]"]]),
    (0.3, [["evaluate.needle.tasks=[vt, fwe]", "evaluate.needle.lengths=[1200]"],
           ["evaluate.needle.yarn={512: 2}"]]),
    (0.3, [["evaluate.positions={length: 256, documents: 2}"]]),
    (0.2, [["measure={lengths: [128, 300], decode_tokens: 4, repeats: 1}"]]),
    (0.5, [[f"runtime.eval_batch_size={size}"] for size in (1, 2, 5)]),
    (0.3, [["runtime.attention=eager"], ["runtime.attention=sdpa"]]),
    (0.4, [[f"runtime.checkpointing={way}"] for way in ("none", "attention", "full")]),
    (0.3, [["runtime.heldout_every_steps=1", "runtime.heldout_sequences=2"]]),
    (0.3, [["runtime.needle_every_steps=2", "runtime.needle_samples=3"]]),
    (0.3, [["runtime.micro_batch_size=1"]]),
    (0.2, [["runtime.compile=true"]]),
]  # fmt: skip
_TOGETHER: list[tuple[float, list[list[str]]]] = [
    (0.7, [[f"runtime.sharding={way}"] for way in ("fsdp", "deepspeed")]),
    (0.3, [["runtime.context_parallel=2"]]),
]
_FRONT: list[tuple[float, list[list[str]]]] = [
    (0.7, [["search.windows=[8, 32]"], ["search.windows=[16, 32, 64]"]]),
    (0.4, [["search.points=[0.2, 0.4, 0.7]"]]),
    (0.5, [["train.budgets=all"], ["train.budgets=[0.5, 0.9]"]]),
    (0.5, [["evaluate.budgets=all"], ["evaluate.budgets=[0.5]"]]),
]


def drawn(rng: random.Random, models: Path) -> list[str]:
    """The overrides of a case."""
    options = list(_OPTIONS)
    overrides = [f"seed={rng.randrange(100)}"]
    if rng.random() < 0.5:
        overrides += [f"model.path={_model(models, rng.choice(_FAMILIES))}"]
        overrides += [f"search.method={rng.choice(_RIVALS)}"]
    else:
        method = rng.choice([name for name in METHODS if name != "given"])
        overrides += [f"search.method={method}"]
        options += _FRONT if method == "front" else []
    if rng.random() < 0.4:
        overrides += ["runtime.processes=2"]
        options += _TOGETHER
    for chance, alternatives in options:
        if rng.random() < chance:
            overrides += rng.choice(alternatives)
    without = "train=null" in overrides
    return [
        override
        for override in overrides
        if not (without and override.startswith(("train.", "rival.")))
    ]


def _model(folder: Path, family: str) -> Path:
    place = folder / family
    if not place.exists():
        model = small_model(family, vocab_size=512, max_position_embeddings=4096)
        model.save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    return place


def main() -> int:
    """Run the cases; 1 where one did not get through."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    (folder / "corpus" / "a.txt").write_text((ROOT / "README.md").read_text() * 4)
    content = recipe(folder, folder / "runs", 1)
    content["prepare"]["train_tokens"] += 128  # for what is held out
    content["runtime"].pop("processes")
    file = folder / "combinations.yaml"
    file.write_text(json.dumps(content))
    ended: dict[str, int] = {}
    for number in range(options.cases):
        overrides = drawn(random.Random(f"{options.seed}/{number}"), folder / "models")
        (folder / f"{number}.txt").write_text("\n".join(overrides) + "\n")
        started, end = time.monotonic(), "refused"
        done = _pipeline("validate", file, overrides)
        if done.returncode == 0:
            done = _pipeline("run", file, overrides)
            end = "through" if done.returncode == 0 else "stopped"
        elif done.returncode != 2 or "unexpected" in done.stderr:
            end = "stopped"
        ended[end] = ended.get(end, 0) + 1
        said = "" if end == "through" else " ".join(done.stderr.split())[-500:]
        print(f"{number} {end}, {time.monotonic() - started:.0f} s {said}", flush=True)
    print(", ".join(f"{count} {end}" for end, count in ended.items()))
    return int("stopped" in ended)


def _pipeline(command: str, file: Path, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "pipeline", command, str(file), *overrides]
    try:
        return subprocess.run(
            call, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(call, 1, "", f"not through after {_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
