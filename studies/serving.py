"""What a hybrid costs in vLLM: modules, cache groups and memory of masks, and a measurement.

    python -m studies.serving masks recipes/shapes/qwen3_8b --ratio 0.75 --window 1024
    .venv-vllm/bin/python -m studies.serving speed ORIGINAL HYBRID --requests 1,8 --lengths 1k,4k,8k

`masks` computes, for masks of each granularity, the cache on one large GPU; it needs no weights.
`speed` runs both models in turn, with 1 GiB of cache each, and prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bosch.engines.vllm.plan import EngineHeads, gpu_plan
from bosch.files import read_json
from bosch.model.stored_config import StoredConfig
from stages.fields import parse_count

_NEW_TOKENS = 32
_GIB = 2**30


def masks(folder: str, ratio: float, window: int, tokens: int, draws: int) -> None:
    """Print a row for each granularity; medians over random masks of unequal layers."""
    config = StoredConfig(read_json(Path(folder) / "config.json"))
    kinds = config.kinds
    layers, heads = len(kinds.full), kinds.heads
    bytes_per_head = 2 * kinds.head_dim * 2
    full = round((1 - ratio) * layers * heads)
    print(
        f"{folder}: {full} of {layers * heads} KV heads full, a window of {window:,}, requests of "
        f"{tokens:,} tokens in bfloat16\n\n| granularity | modules | groups | GiB in vLLM | of "
        "generate's | tokens in 1 GiB |\n|---|---:|---:|---:|---:|---:|"
    )
    generate = (full * tokens + (layers * heads - full) * (window - 1)) * bytes_per_head
    cases: dict[str, Iterable[list[int]]] = {"the original": [[heads] * layers]}
    for size in (n for n in range(1, heads + 1) if heads % n == 0):
        cases["whole layers" if size == heads else str(size)] = [
            _random_counts(layers, heads, full, size, seed) for seed in range(draws)
        ]
    for name, counts_of in cases.items():
        rows = []
        for counts in counts_of:
            own: list[EngineHeads] = [{window: kinds.heads} for window in kinds.windows.values()]
            mask: list[EngineHeads] = [{None: n, window: heads - n} for n in counts]
            plan, request = gpu_plan([*mask, *own], config.max_positions, tokens)
            pool = plan.pool(request)
            rows.append((plan.kinds.total(), pool.groups, pool.reserved * bytes_per_head))
        modules, groups, size = (statistics.median(column) for column in zip(*rows, strict=True))
        share = "" if name == "the original" else f"{size / generate:.2f}"
        print(
            f"| {name} | {modules:.0f} | {groups:.0f} | {size / _GIB:.2f} | {share} | "
            f"{_GIB / size * tokens:,.0f} |"
        )


def _random_counts(layers: int, heads: int, full: int, size: int, seed: int) -> list[int]:
    """Full heads of each layer, drawn in units of `size` heads of a layer."""
    units = np.random.default_rng(seed).permutation(layers * heads // size) < full // size
    return [int(n) for n in size * units.reshape(layers, -1).sum(1)]


def speed(folders: list[str], requests: list[int], lengths: list[int], repeats: int) -> None:
    """Print caches and seconds of both models; their measurements take turns."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to ask the workers for their groups
    import torch
    from vllm import LLM

    gpu = torch.cuda.is_available()
    models = [
        LLM(
            folder, skip_tokenizer_init=True, max_model_len=max(lengths) + _NEW_TOKENS,
            max_num_seqs=max(requests), enable_prefix_caching=False, enforce_eager=not gpu,
            dtype="bfloat16" if gpu else "float32", gpu_memory_utilization=0.45,
            kv_cache_memory_bytes=_GIB if gpu else None,
        )
        for folder in folders
    ]  # fmt: skip
    print("| | modules | groups | tokens in 1 GiB |\n|---|---:|---:|---:|")
    for folder, model in zip(folders, models, strict=True):
        ((modules, groups),) = model.collective_rpc(_groups)
        tokens = model.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        print(f"| {folder} | {modules} | {groups} | {tokens:,} |", flush=True)
    print(
        "\nSeconds of a prompt and of a generated token, hybrid / original:\n\n"
        "| requests | tokens | prefill | decode |\n|---:|---:|---:|---:|"
    )
    for number in requests:
        for length in lengths:
            times: list[list[tuple[float, float]]] = [[] for _ in models]
            for repeat in range(repeats + 1):  # the first warms up
                for index, model in enumerate(models):
                    one, all_tokens = (
                        _seconds(model, number, length, new, repeat) for new in (1, _NEW_TOKENS)
                    )
                    times[index].append((one, (all_tokens - one) / (_NEW_TOKENS - 1)))
            original, hybrid = (
                [statistics.median(column) for column in zip(*pairs[1:], strict=True)]
                for pairs in times
            )
            cells = (
                f"{b:.4g} / {a:.4g} = {b / a:.2f}" for a, b in zip(original, hybrid, strict=True)
            )
            print(f"| {number} | {length} | {' | '.join(cells)} |", flush=True)


def _groups(worker: Any) -> tuple[int, int]:
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    return sum(len(group.layer_names) for group in groups), len(groups)


def _seconds(model: Any, requests: int, length: int, new_tokens: int, seed: int) -> float:
    from vllm import SamplingParams

    vocabulary = model.llm_engine.model_config.get_vocab_size()
    ids = np.random.default_rng(seed).integers(0, vocabulary, (requests, length))
    options = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    model.generate([{"prompt_token_ids": row.tolist()} for row in ids], options, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    """Compute or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of_masks = commands.add_parser("masks")
    of_masks.add_argument("folder")
    of_masks.add_argument("--ratio", type=float, default=0.75)
    of_masks.add_argument("--window", type=int, default=1024)
    of_masks.add_argument("--tokens", type=parse_count, default=32 * 1024)
    of_masks.add_argument("--draws", type=int, default=10)
    of_speed = commands.add_parser("speed")
    of_speed.add_argument("folders", nargs=2, metavar=("ORIGINAL", "HYBRID"))
    of_speed.add_argument("--requests", default="1,8")
    of_speed.add_argument("--lengths", default="1k,2k,4k,8k")
    of_speed.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.command == "masks":
        masks(given.folder, given.ratio, given.window, given.tokens, given.draws)
    else:
        requests, lengths = (
            [int(str(parse_count(n))) for n in text.split(",")]
            for text in (given.requests, given.lengths)
        )
        speed(given.folders, requests, lengths, given.repeats)


if __name__ == "__main__":
    main()
