"""Every test and measurement that needs a GPU, on one page: what launch/gpu_check.sh runs.

python -m tests.gpu.check PAGE
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from bosch.attention import BACKENDS, fastest_backend
from pipeline.recipe.load import ROOT
from stages.versions import installed_versions

PACKAGES = ("torch", "transformers", "flash-attn", "liger-kernel", "deepspeed", "triton")
# Heading, and arguments of pytest or a module; -s, so that figures are printed.
CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Tests", ("pytest", "-q", "-s", "tests/gpu")),
    ("Training: 1.7B shape, 32k, ρ = 0.75", ("tests.gpu.training",)),
)
# Needs no GPU, and shows that the parts above would start.
DRY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Tests, collected", ("pytest", "-qq", "--collect-only", "tests/gpu")),
    ("Training of a small shape", ("tests.gpu.training", "--small")),
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


def run_check(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and output of a module of this Python."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, check=False,
        env={**os.environ, "TQDM_DISABLE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def main(page: Path) -> int:
    """Write the page; 0 when every check passed, 3 when there is no GPU to check."""
    on_gpu = torch.cuda.is_available()
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"# GPU check, {datetime.date.today()}", machine()]
    if not on_gpu:
        parts.append("There is no GPU: only what needs none was run, and nothing is shown.")
    failed = False
    for heading, arguments in CHECKS if on_gpu else DRY:
        started = time.monotonic()
        status, output = run_check(arguments)
        failed |= status != 0
        command = f"python -m {' '.join(arguments)}"
        verdict = "passed" if status == 0 else f"failed with status {status}"
        seconds = time.monotonic() - started
        parts.append(f"## {heading}\n\n`{command}` {verdict} in {seconds:.0f} s\n\n```text")
        parts.append(output.strip()[-20_000:] + "\n```")
        page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"{heading}: {verdict}, {seconds:.0f} s")
    print(f"written: {page}")
    return 1 if failed else 0 if on_gpu else 3


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
