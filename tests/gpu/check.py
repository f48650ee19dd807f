"""What needs a GPU, on one page: what launch/gpu_check.sh runs.

python -m tests.gpu.check PAGE [--limit SECONDS] [--dry]
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from bosch.attention import fastest_backend
from bosch.backends import BACKENDS
from pipeline.recipe.load import ROOT
from stages.versions import installed_versions

PACKAGES = ("torch", "transformers", "liger-kernel", "deepspeed", "triton")
PYTEST = ("pytest", "-q", "-s")
# Heading and arguments of a module, those of most worth first; pytest's -s prints figures.
CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Six steps at the shape of 1.7B, 32k tokens", ("tests.gpu.training",)),
    ("The same with flex", ("tests.gpu.training", "--attention", "flex")),
    ("Attention beside the best all-full kernel", (*PYTEST, "tests/gpu/test_attention_speed.py")),
    ("Losses in bf16, and with Liger", (*PYTEST, "tests/gpu/test_train_on_gpu.py")),
    ("Two layers of experts", ("tests.gpu.training", "--shape", "qwen3_30b_a3b", "--layers", "2")),
    ("Attention against the oracle", (*PYTEST, "tests/gpu/test_attention_on_gpu.py")),
)


def machine() -> str:
    """GPUs, packages and the attention backends that can be used."""
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_name(number) for number in range(count)]
    versions = installed_versions(PACKAGES)
    usable = [name for name, entry in BACKENDS.items() if entry.usable()]
    return "\n".join(
        [
            f"- GPUs: {', '.join(gpus) or 'none'}",
            f"- packages: {', '.join(f'{name} {v}' for name, v in versions.items())}",
            f"- attention: {', '.join(usable)}; in training {fastest_backend(torch.bfloat16)}",
        ]
    )


def run_check(arguments: tuple[str, ...], seconds: float) -> tuple[str, str]:
    """What became of a module of this Python, which may take `seconds`; and its output."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, check=False, timeout=seconds,
            env={**os.environ, "TQDM_DISABLE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return "was stopped at the limit", (late.stdout or b"").decode(errors="replace")
    if done.returncode:
        return f"failed with status {done.returncode}", done.stdout
    return "passed", done.stdout


def dry(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments for tiny shapes; tests are only collected."""
    return (*arguments, "--collect-only" if arguments[0] == "pytest" else "--small")


def main(page: Path, limit: float, is_dry: bool) -> int:
    """Write the page; 0 when every check passed, 3 when there is no GPU to check."""
    started, on_gpu = time.monotonic(), torch.cuda.is_available()
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"# GPU check, {datetime.date.today()}", machine()]
    if not on_gpu or is_dry:
        parts.append("Tiny shapes: this shows that the parts start, and nothing else.")
    failed = False
    for heading, arguments in CHECKS:
        if not on_gpu or is_dry:
            arguments = dry(arguments)
        begun = time.monotonic()
        left = limit - (begun - started)
        found, output = run_check(arguments, left) if left > 0 else ("was not begun", "")
        failed |= found != "passed"
        verdict = f"{found}, {time.monotonic() - begun:.0f} s"
        parts.append(f"## {heading}\n\n`python -m {' '.join(arguments)}` {verdict}\n\n```text")
        parts.append(output.strip()[-20_000:] + "\n```")
        page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"{heading}: {verdict}", flush=True)
    print(f"written: {page}")
    return 1 if failed else 0 if on_gpu else 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all parts")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any machine")
    chosen = parser.parse_args()
    sys.exit(main(chosen.page, chosen.limit, chosen.dry))
