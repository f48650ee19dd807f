"""`python -m pipeline measure MODEL_DIR`: its options, and the call of the measurement."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from pipeline import log

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)

HELP = "measure speed and memory of a model beside its hybrids"

# Options that are handed to the settings as they are, with what their help says.
_PLAIN = {
    "sinks": "sink tokens of the sliding heads (default: 0; a hybrid model keeps its own)",
    "dtype": "float32, bfloat16 (default) or float16",
    "device": "auto (default: a GPU where there is one), cpu or cuda",
    "threads": "threads of a CPU process (default: torch's own choice)",
    "clock": (
        "wall (default), or processor: on a CPU that has other work, the time spent on this, "
        "summed over the threads"
    ),
    "chunk": "tokens of one pass of the prefill (default: 8,192)",
    "decode-tokens": "tokens decoded after the prompt (default: 64)",
    "batch-size": "rows measured together (default: 1)",
    "repeats": "runs of each point, of which the median counts (default: 3)",
    "attention": "backend of the hybrid attention (default: auto)",
    "original-attention": (
        "attention of the original: a name of transformers such as sdpa or flash_attention_2, or "
        "hybrid for the hybrid attention with every head full (default: flash_attention_2 beside "
        "the flash backend, else sdpa)"
    ),
    "seed": "seed of the prompts and of random weights (default: 0)",
}
_LISTS = {
    "lengths": "tokens of the prompts, like 4k,8k (default: 4k,8k,16k,32k)",
    "ratios": "shares of sliding KV heads (default: 0.25,0.5,0.75,0.875)",
    "windows": "windows of the sliding heads (default: 1024, or a hybrid model's own)",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `measure`."""
    command.add_argument("model", metavar="MODEL_DIR", help="an original or a hybrid model")
    command.add_argument(
        "--original",
        metavar="DIR",
        help="original of a hybrid MODEL_DIR (default: its own weights with every head full)",
    )
    command.add_argument("--output", metavar="DIR", help="default: runs/measure/<its name>")
    command.add_argument(
        "--random-weights",
        action="store_true",
        help="of MODEL_DIR only config.json is needed",
    )
    command.add_argument(
        "--memory-limit", metavar="SIZE", help="memory a run may take, like 40GB or 512MiB"
    )
    for name, text in {**_LISTS, **_PLAIN}.items():
        command.add_argument(f"--{name}", metavar="…,…" if name in _LISTS else "…", help=text)


def run(options: argparse.Namespace) -> int:
    """Measure, and say where the results are."""
    from stages.measure import measure
    from stages.measuring.settings import checked_settings

    log.configure("info")
    names = (name.replace("-", "_") for name in (*_LISTS, *_PLAIN))
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given = {name: text for name, text in given.items() if text is not None}
    for name in _LISTS:
        if name in given:
            given[name] = [part for part in given[name].split(",") if part.strip()]
    if options.memory_limit is not None:
        given["memory_limit"] = _bytes(options.memory_limit)
    given["random_weights"] = options.random_weights
    settings = checked_settings(given)
    output = Path(options.output or Path("runs", "measure", Path(options.model).resolve().name))
    measure(options.model, options.original, settings, output)
    print(f"the figures are in {output}/efficiency.json, the pictures beside it")
    return 0


def _bytes(text: str) -> int:
    """40GB, 512MiB, 1000000: bytes."""
    match = _SIZE.match(text)
    if match is None:
        raise UserError(f"--memory-limit: expected a size like 40GB or 512MiB, found '{text}'")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
