"""Tokens per second of vLLM with a hybrid and with its original, at equal cache memory.

    .venv-vllm/bin/python -m tests.benchmarks.vllm_throughput        on the CPU, quickstart's model
    python -m tests.benchmarks.vllm_throughput ORIGINAL HYBRID --cache-bytes 20e9 --prompt 30000 \
        --generated 500 --requests 64 --dtype bfloat16      on a GPU

More requests wait than the cache of the original holds. Each model has its own engine, with equal
bytes of cache and otherwise default settings. Rounds alternate between the two; the ratio is that
of their best rounds. On a CPU the seconds are processor time of this process and of the engine's
processes, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm import LLM, SamplingParams

from bosch.heads import HeadMaskFile
from bosch.model.loading import load_model
from bosch.model.materialize import materialize

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "recipes" / "quickstart" / "base_model"
MASK = ROOT / "recipes" / "masks" / "quickstart" / "bosch_plus-0.958.json"


def main() -> None:
    """Measure and print the figures."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        original, hybrid = options.original, options.hybrid
        if hybrid is None:
            file = HeadMaskFile.load(MASK)
            hybrid = Path(folder) / "hybrid"
            model = load_model(original, dtype="float32")
            materialize(model, file.mask, file.windows).save_pretrained(hybrid)
        engines = {
            name: _engine(path, options)
            for name, path in (("original", original), ("hybrid", hybrid))
        }
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for seed in range(options.rounds):
            for name, llm in engines.items():
                rates[name].append(_tokens_per_second(llm, options, seed))
        for name, llm in engines.items():
            cache = llm.llm_engine.vllm_config.cache_config
            rounds = ", ".join(f"{rate:.1f}" for rate in rates[name])
            print(f"{name}: {rounds} tokens/s, "
                  f"cache of {cache.kv_cache_size_tokens:,} tokens")  # fmt: skip
        print(f"ratio: {max(rates['hybrid']) / max(rates['original']):.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("original", nargs="?", type=Path, default=BASE)
    parser.add_argument("hybrid", nargs="?", type=Path, help="default: the quickstart's mask")
    parser.add_argument("--cache-bytes", type=float, default=48 * 2**20)
    parser.add_argument("--prompt", type=int, default=1800, help="tokens of a prompt")
    parser.add_argument("--generated", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, help="default: as the engine is served")
    parser.add_argument("--block-size", type=int, help="default: as the engine is served")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def _engine(path: Path, options: argparse.Namespace) -> Any:
    return LLM(
        str(path), skip_tokenizer_init=True, dtype=options.dtype, enforce_eager=True,
        block_size=options.block_size, kv_cache_memory_bytes=int(options.cache_bytes),
        max_model_len=options.prompt + options.generated,
        max_num_batched_tokens=options.batch_tokens, max_num_seqs=options.requests,
        enable_prefix_caching=False,
    )  # fmt: skip


def _tokens_per_second(llm: Any, options: argparse.Namespace, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    shape = options.requests, options.prompt
    prompts = torch.randint(3, 1000, shape, generator=generator).tolist()
    parameters = SamplingParams(
        temperature=0, max_tokens=options.generated, ignore_eos=True, detokenize=False
    )
    clock = time.perf_counter if torch.cuda.is_available() else _processor_seconds
    started = clock()
    llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    return options.requests * options.generated / (clock() - started)


def _processor_seconds() -> float:
    current = psutil.Process()
    times = [process.cpu_times() for process in (current, *current.children(recursive=True))]
    return sum(time.user + time.system for time in times)


if __name__ == "__main__":
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would replace --cache-bytes
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # waiting threads use processor time, too
    main()
