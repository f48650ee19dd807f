"""Hybrid attention on the CPU stays within its share of the cost of all-full attention.

    pytest -s tests/benchmarks/test_attention_speed.py

One thread; processor time, so that other work on the machine counts little. The variants compared
run in turn, and the minimum over the repeats counts. bf16, 16 query heads, 8 KV heads, D = 64,
W = 256, rho = 0.75; T = 8,192 unless a test says otherwise. Prints the rows of
docs/notes/benchmarks.md.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import DynamicCache

from bosch.attention import AttentionContext, HeadLayout, causal, hybrid_attention
from bosch.model.cache import HybridCache, held_bytes
from bosch.window import Window
from stages.measure.process import memory_meter
from tests.attention_case import by_rows, full_first

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LENGTH, WINDOW, QUERY_HEADS, KV_HEADS, FULL, DIM = 8192, 256, 16, 8, 2, 64
DECODE_LENGTH = 16384
CHUNK, CHUNK_END = 2048, 16384
CAPPED_LENGTH = 2048
LENGTHS = (2048, 4096, 8192, 16384, 32768)
RATIO = 1 - FULL / KV_HEADS

Variant = Callable[[], object]


@pytest.fixture(autouse=True, scope="module")
def _machine() -> None:
    """Print processor and versions; no name of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    kinds = [kind for kind in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if kind in flags]
    print(
        f"\n{model} ({', '.join(kinds)}), {os.cpu_count()} cores, one thread; torch "
        f"{torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def ideal_ratio(length: int, window: int, ratio: float) -> float:
    """Share of the query-key pairs that is left: 1 - rho + rho W (2T - W) / T^2."""
    return 1 - ratio + ratio * window * (2 * length - window) / length**2


def test_a_forward_pass_costs_little_more_than_its_score_entries_in_both_modes() -> None:
    """Forward passes of deploy mode and of search mode, over all-full."""
    tensors = _tensors(LENGTH)
    rows = [True, False, False, False, True, False, False, False]
    layouts = {"deploy": _deploy(), "search": by_rows(rows, Window(WINDOW))}
    variants: dict[str, Variant] = {"full": lambda: _all_full(*tensors)}
    for name, layout in layouts.items():
        variants[name] = lambda layout=layout: hybrid_attention(*tensors, layout)
    seconds = _least_seconds(variants, 4)
    deploy, search = (seconds[name] / seconds["full"] for name in layouts)
    ideal = ideal_ratio(LENGTH, WINDOW, RATIO)
    print(f"\n| forward, deploy mode, over all-full | {deploy:.3f} | {ideal:.3f} |")
    print(f"| forward, search mode, over all-full | {search:.3f} | {ideal:.3f} |")
    assert deploy <= 0.40
    assert search <= 1.10 * deploy


def test_a_forward_and_backward_pass_costs_less_than_half_of_all_full() -> None:
    """Deploy mode over all-full."""
    tensors = _tensors(LENGTH, grad=True)
    weight = torch.randn(1, LENGTH, QUERY_HEADS, DIM, dtype=torch.bfloat16)

    def step(attend: Callable[..., Tensor], *layout: HeadLayout) -> None:
        torch.autograd.grad(attend(*tensors, *layout), tensors, weight)

    variants: dict[str, Variant] = {
        "full": lambda: step(_all_full),
        "hybrid": lambda: step(hybrid_attention, _deploy()),
    }
    seconds = _least_seconds(variants, 3)
    ratio, ideal = seconds["hybrid"] / seconds["full"], ideal_ratio(LENGTH, WINDOW, RATIO)
    print(f"\n| forward and backward, over all-full | {ratio:.3f} | {ideal:.3f} |")
    assert ratio <= 0.45


def test_a_third_group_of_heads_costs_little() -> None:
    """Three groups over two with as many score entries: windows of 0.5 and 1.5 times `WINDOW`."""
    tensors, sliding = _tensors(LENGTH), (KV_HEADS - FULL) // 2
    narrow, wide = Window(WINDOW // 2), Window(WINDOW + WINDOW // 2)
    three = HeadLayout.deploy({None: FULL, wide: sliding, narrow: sliding})
    variants: dict[str, Variant] = {
        "two": lambda: hybrid_attention(*tensors, _deploy()),
        "three": lambda: hybrid_attention(*tensors, three),
    }
    seconds = _least_seconds(variants, 4)
    assert seconds["three"] / seconds["two"] <= 1.1


def test_sliding_heads_cost_linear_time() -> None:
    """Exponent b of the cost T^b of a layer of sliding heads, fitted over `LENGTHS`."""
    layout = full_first(0, KV_HEADS, Window(WINDOW))
    inputs = {length: _tensors(length) for length in LENGTHS}
    variants: dict[str, Variant] = {
        str(length): lambda tensors=tensors: hybrid_attention(*tensors, layout)
        for length, tensors in inputs.items()
    }
    seconds = list(_least_seconds(variants, 3).values())
    exponent = float(np.polyfit(np.log(LENGTHS), np.log(seconds), 1)[0])
    print(f"\n| sliding heads alone, exponent of T | {exponent:.2f} | 1 |")
    assert exponent <= 1.1


def test_decoding_a_token_costs_little_more_than_its_share_of_the_cache() -> None:
    """Cache update and attention of one layer for one token after 16,384, over the original's."""
    _, key, value = _tensors(DECODE_LENGTH)
    query, new_key, new_value = _tensors(1)
    original, hybrid, layout = DynamicCache(), HybridCache([_deploy()]), _deploy()
    original.update(key, value, 0)
    hybrid.update(key, value, 0)[0].settle(AttentionContext(DECODE_LENGTH))
    held = held_bytes(hybrid)
    entries = FULL * DECODE_LENGTH + (KV_HEADS - FULL) * Window(WINDOW).past

    def original_step() -> None:
        _all_full(query, *original.update(new_key, new_value, 0))

    def hybrid_step() -> None:
        keys, values = hybrid.update(new_key, new_value, 0)
        context = AttentionContext(1, hybrid.get_seq_length() - 1)
        hybrid_attention(query, keys, values, layout, context)
        keys.settle(context)

    seconds = _least_seconds({"original": original_step, "hybrid": hybrid_step}, 40)
    ratio, formula = seconds["hybrid"] / seconds["original"], 2 * DIM * 2 * entries
    share = entries / (KV_HEADS * DECODE_LENGTH)
    print(f"\n| a token after 16k, over the original | {ratio:.3f} | {share:.3f} |")
    print(f"| bytes of the layer's cache | {held:,} | {formula:,} |")
    assert held == formula
    assert ratio <= 0.40


def test_a_chunk_after_a_past_makes_no_masks() -> None:
    """Full heads over a chunk of 2,048 after 14,336 tokens, over the same under masks.

    Memory is each variant's peak above what was in use before.
    """
    query, key, value = _tensors(CHUNK_END)
    query, layout = query[:, :, -CHUNK:], full_first(KV_HEADS, KV_HEADS, Window(WINDOW))
    meter = memory_meter(query.device)

    def chunk() -> None:
        with torch.no_grad():
            hybrid_attention(query, key, value, layout)

    def masked() -> None:
        with patch.object(causal, "attention_after_past", lambda *states: None):
            chunk()

    variants: dict[str, Variant] = {"chunk": chunk, "masked": masked}
    seconds, peaks = _least_seconds(variants, 3), {}
    for name, work in variants.items():
        meter.restart()
        before = meter.in_use()
        work()
        peaks[name] = meter.peak() - before
    ratio = seconds["chunk"] / seconds["masked"]
    print(f"\n| a chunk after a past, over the same under masks | {ratio:.3f} | |")
    print(f"| memory on top, MiB | {peaks['chunk'] >> 20} | {peaks['masked'] >> 20} |")
    assert ratio <= 0.95
    assert peaks["chunk"] <= peaks["masked"] / 3


@pytest.mark.parametrize("full", [KV_HEADS, FULL])
def test_soft_capped_logits_cost_at_most_ten_times_as_much(full: int) -> None:
    """Forward passes over 2,048 tokens with a soft-cap, over those without: full, and hybrid."""
    tensors, layout = _tensors(CAPPED_LENGTH), full_first(full, KV_HEADS, Window(WINDOW))
    variants: dict[str, Variant] = {
        str(cap): lambda cap=cap: hybrid_attention(*tensors, layout, softcap=cap)
        for cap in (None, 50.0)
    }
    seconds = _least_seconds(variants, 3)
    ratio = seconds["50.0"] / seconds["None"]
    print(f"\n| soft-capped logits over plain ones, {full} full heads | {ratio:.1f} | |")
    assert ratio <= 10


def _tensors(length: int, grad: bool = False) -> list[Tensor]:
    """Query [1, 16, T, 64], key and value [1, 8, T, 64]."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "requires_grad": grad}
    heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, count, length, DIM, **options) for count in heads]


def _all_full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    causal = query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def _deploy() -> HeadLayout:
    return full_first(FULL, KV_HEADS, Window(WINDOW))


def _least_seconds(variants: dict[str, Variant], repeats: int) -> dict[str, float]:
    """Minimum processor time of each variant; they run in turn, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: min(seconds[1:]) for name, seconds in times.items()}
