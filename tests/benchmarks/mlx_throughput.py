"""Tokens per second of mlx-lm with a hybrid and with its original, after a long prompt.

    .venv-mlx/bin/python -m tests.benchmarks.mlx_throughput             quickstart's model and mask
    python -m tests.benchmarks.mlx_throughput ORIGINAL HYBRID --prompt 32768    directories

Both are in memory; in each round one generates after the other, which begins taking turns, so that
what else the machine does meets both. The ratio is of the medians. Seconds are of the clock on
Apple's chips, elsewhere processor time of this process, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from bosch.heads import HeadMaskFile
from bosch.mlx.models import register
from bosch.model import loading
from bosch.model.materialize import materialize

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "recipes" / "quickstart" / "base_model"
MASK = ROOT / "recipes" / "masks" / "quickstart" / "bosch_plus-0.958.json"
_STEP = 2048  # tokens of a prompt that mlx-lm reads at once, by default


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("original", nargs="?", type=Path, default=BASE)
    parser.add_argument("hybrid", nargs="?", type=Path, help="default: the quickstart's mask")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--generated", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    register()
    with tempfile.TemporaryDirectory() as folder:
        hybrid = options.hybrid or _quickstart(options.original, Path(folder))
        paths = {"original": options.original, "hybrid": hybrid}
        models = {name: load_model(path)[0] for name, path in paths.items()}
        prompts: dict[str, list[float]] = {name: [] for name in models}
        answers: dict[str, list[float]] = {name: [] for name in models}
        held: dict[str, int] = {}
        for number in range(options.rounds):
            for name in sorted(models, reverse=number % 2 == 1):
                reading, answering, held[name] = _seconds(models[name], options, number)
                prompts[name].append(options.prompt / reading)
                answers[name].append(options.generated / answering)
                now = f"generates {answers[name][-1]:.1f}, reads {prompts[name][-1]:.0f}"
                print(f"round {number + 1} of {options.rounds}, {name}: {now}", flush=True)
    clock = "second" if _clock() is time.perf_counter else "processor second"
    print(f"after {options.prompt:,} tokens, tokens per {clock} (median of {options.rounds}):")
    for name in models:
        print(f"{name}: generates {statistics.median(answers[name]):.1f}, "
              f"reads {statistics.median(prompts[name]):.0f}, "
              f"cache {held[name] / 2**20:.2f} MiB")  # fmt: skip
    for what, rates in (("generating", answers), ("reading", prompts)):
        ratio = statistics.median(rates["hybrid"]) / statistics.median(rates["original"])
        print(f"ratio, {what}: {ratio:.2f}")


def _quickstart(original: Path, folder: Path) -> Path:
    file = HeadMaskFile.load(MASK)
    model = loading.load_model(original)
    materialize(model, file.mask, file.windows).save_pretrained(folder)
    return folder


def _clock() -> Callable[[], float]:
    return time.perf_counter if mx.metal.is_available() else time.process_time


def _seconds(model: Any, options: argparse.Namespace, seed: int) -> tuple[float, float, int]:
    """Seconds to read a prompt and to generate greedily after it, and bytes of the cache then."""
    clock, cache = _clock(), make_prompt_cache(model)
    tokens = mx.random.randint(3, 1000, (1, options.prompt), key=mx.random.key(seed))
    started = clock()
    for first in range(0, options.prompt, _STEP):
        token = model(tokens[:, first : first + _STEP], cache=cache)[:, -1:].argmax(-1)
        mx.eval(token, [layer.state for layer in cache])
    read = clock()
    for _ in range(options.generated):
        token = model(token, cache=cache).argmax(-1)
        mx.eval(token)
    return read - started, clock() - read, sum(layer.nbytes for layer in cache)


if __name__ == "__main__":
    main()
