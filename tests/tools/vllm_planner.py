"""Caches that vLLM's own planner allots to a plan's modules.

python -m tests.tools.vllm_planner    records it
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bosch.engines.vllm.groups import groups_of_modules
from bosch.engines.vllm.plan import ModulePlan, Request, module_plan

RECORD = Path(__file__).parents[1] / "data" / "vllm_planner.json"
CACHE_BYTES = 2**37


def cases() -> list[dict[str, Any]]:
    """Random masks of published shapes, shapes without pattern, and models with own windows."""
    generator = np.random.default_rng(0)
    drawn: list[dict[str, Any]] = []

    def add(counts: list[int], heads: int, windows: list[int], ranks: int, **sizes: Any) -> None:
        drawn.append(
            {
                "full_kv_heads_per_layer": counts, "num_key_value_heads": heads,
                "windows": windows, "ranks": ranks, "head_dim": 128, "itemsize": 2,
                "block_size": 16, "tokens_in_flight": 8192, "tokens": 32_768, **sizes,
            }
        )  # fmt: skip

    for layers, heads in ((36, 8), (28, 8), (48, 4), (24, 2), (32, 32)):
        for ratio in (0.25, 0.5, 0.6, 0.75, 0.875):
            units = np.zeros(layers * heads, dtype=int)
            units[generator.permutation(units.size)[: round((1 - ratio) * units.size)]] = 1
            counts = units.reshape(layers, heads).sum(axis=1).tolist()
            add(counts, heads, [1024] * layers, 1, tokens=int(generator.choice([4096, 131_072])))
    for ranks in (1, 2, 4, 8):
        counts = (8 * generator.integers(0, 3, 20) // 2 * 2).tolist()
        counts = [min(16, 8 * (n // 8)) for n in counts]
        add(counts, 16, [512] * 20, ranks, tokens_in_flight=2048)
    add([8] * 12, 8, [128] * 12, 1)
    add([0] * 12, 8, [128] * 12, 2)
    add([4, 0, 8, 2] * 4, 8, [100, 64, 100, 100] * 4, 1, tokens=70, block_size=32)
    add([1, 3, 2], 4, [16] * 3, 1, head_dim=32, itemsize=4, block_size=32, tokens=256,
        tokens_in_flight=64)  # fmt: skip
    # Three windows.
    for ranks in (1, 2):
        rows = generator.multinomial(4, (0.2, 0.3, 0.3, 0.2), size=24) * 2
        add([], 8, [4096, 1024, 128], ranks, heads_by_window=rows.tolist())
    return drawn


def random_cases(seed: int, number: int = 60) -> list[dict[str, Any]]:
    """Masks drawn head by head from menus of one to three windows, for engines of any settings."""
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(number):
        layers, heads = int(generator.integers(2, 49)), int(generator.choice([2, 4, 8, 16]))
        count = int(generator.integers(1, 4))
        menu = sorted(generator.choice(np.arange(8, 5000), count, replace=False), reverse=True)
        shares = generator.dirichlet(np.ones(1 + count))
        block = int(generator.choice([16, 32, 64]))
        drawn.append(
            {
                "heads_by_window": generator.multinomial(heads, shares, size=layers).tolist(),
                "num_key_value_heads": heads, "windows": [int(window) for window in menu],
                "ranks": 1, "head_dim": int(generator.choice([64, 128])), "itemsize": 2,
                "block_size": block, "tokens_in_flight": int(generator.integers(256, 16_384)),
                "tokens": int(generator.integers(5000, 200_000)),
            }
        )  # fmt: skip
    return drawn


def two_kinds(counts: list[int], heads: int, windows: list[int]) -> list[dict[int | None, int]]:
    """Heads by window of layers with `counts` full heads of `heads`; the others have one window."""
    return [
        {None: full, window: heads - full} for full, window in zip(counts, windows, strict=True)
    ]


def layers_of(case: dict[str, Any]) -> list[dict[int | None, int]]:
    """Heads by window of each layer of a case."""
    if "heads_by_window" in case:  # of each layer: full ones, then those of each window
        kinds = (None, *case["windows"])
        return [dict(zip(kinds, row, strict=True)) for row in case["heads_by_window"]]
    return two_kinds(case["full_kv_heads_per_layer"], case["num_key_value_heads"], case["windows"])


def request_of(case: dict[str, Any]) -> Request:
    """The request of a case."""
    return Request(case["tokens"], case["block_size"], case["tokens_in_flight"])


def plan_of(case: dict[str, Any], own_groups: bool = False) -> ModulePlan:
    """The plan for a case."""
    return module_plan(layers_of(case), request_of(case), case["ranks"], own_groups)


def bytes_by_plan(case: dict[str, Any], own_groups: bool = False) -> int:
    """Bytes of a request by `ModulePlan`."""
    bytes_per_head = 2 * case["head_dim"] * case["itemsize"]
    return plan_of(case, own_groups).request_bytes(request_of(case), bytes_per_head)


def bytes_by_vllm(case: dict[str, Any], own_groups: bool = False) -> int:
    """The same from vLLM's planner, for a cache of CACHE_BYTES.

    Groups of our own are for vLLM 0.33 or later, which asks the model's class for them.
    """
    import torch
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec

    common = {
        "block_size": case["block_size"],
        "head_size": case["head_dim"],
        "dtype": {2: torch.bfloat16, 4: torch.float32}[case["itemsize"]],
    }
    specs = {
        f"layers.{layer}.attn.module{index}": FullAttentionSpec(**common, num_kv_heads=heads)
        if window is None
        else SlidingWindowSpec(**common, num_kv_heads=heads, sliding_window=window)
        for layer, modules in enumerate(plan_of(case, own_groups).modules)
        for index, (window, _, heads) in enumerate(modules)
    }
    model_class = SimpleNamespace(get_kv_cache_groups=groups_of_modules)
    layout = KVCacheLayout.BLHNC if own_groups else KVCacheLayout.LBHNC
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=case["ranks"]
        ),
        model_config=SimpleNamespace(
            max_model_len=case["tokens"], original_max_model_len=None,
            hf_config=SimpleNamespace(model_type="qwen3"), architectures=[],
            supports_kv_cache_grouping=own_groups,
            registry=SimpleNamespace(resolve_model_cls=lambda *_: (model_class, "")),
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case["tokens_in_flight"],
    )  # fmt: skip
    cache_config = _planned(config, specs)
    block_bytes = cache_config.kv_cache_tensors[0].size // cache_config.num_blocks
    requests = get_max_concurrency_for_kv_cache_config(config, cache_config)
    return int(round(cache_config.num_blocks / requests) * block_bytes)


def _planned(config: Any, specs: dict[str, Any]) -> Any:
    """The cache of one worker by vLLM's planner, which moved in 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planner
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, [specs], [CACHE_BYTES])[0]
    groups = planner.get_global_kv_cache_groups(config, [specs])
    return planner.get_kv_cache_configs(config, [specs], [CACHE_BYTES], groups)[0]


def record() -> None:
    """Write what vLLM's planner gives for every case."""
    import vllm

    rows = [{"case": case, "request_bytes": bytes_by_vllm(case)} for case in cases()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    RECORD.write_text(
        f'{{"vllm": "{vllm.__version__}", "rows": [\n{lines}\n]}}\n', encoding="utf-8"
    )


def groupings() -> tuple[bool, ...]:
    """With and without groups of our own, as far as this vLLM can be asked for them."""
    from vllm.model_executor.models import interfaces

    return (False, True) if hasattr(interfaces, "SupportsKVCacheGrouping") else (False,)


if __name__ == "__main__":
    record()
