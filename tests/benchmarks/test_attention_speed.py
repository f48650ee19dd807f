"""Cost of hybrid attention on the CPU, beside all-full attention in the same run.

    pytest tests/benchmarks/test_attention_speed.py

Processor time of one thread is compared, so that other work on the machine counts little. bf16,
16 query heads, 8 KV heads, D = 64, W = 256, rho = 0.75, T = 8,192 unless a test says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from bosch.attention import HeadLayout, Span, hybrid_attention
from bosch.cache import HybridCache

pytestmark = pytest.mark.slow

WINDOW, FULL = 256, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tensors(length: int, queries: int | None = None, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(16, queries or length), (8, length), (8, length)]
    options = {"dtype": torch.bfloat16, "requires_grad": grad}
    return [torch.randn(1, heads, n, 64, **options) for heads, n in sizes]


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Least processor time of some runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def _all_full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    causal = query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def _deploy() -> HeadLayout:
    return HeadLayout.deploy(FULL, 8, WINDOW)


def test_forward_and_both_modes() -> None:
    tensors = _tensors(8192)
    full = _seconds(lambda: _all_full(*tensors))
    deploy = _seconds(lambda: hybrid_attention(*tensors, _deploy())) / full
    rows = [True, False, False, False, True, False, False, False]
    layout = HeadLayout.search(rows, WINDOW)
    search = _seconds(lambda: hybrid_attention(*tensors, layout)) / full
    print(f"forward: deploy {deploy:.3f}, search {search:.3f} of all-full")
    assert deploy <= 0.40
    assert search <= 1.10 * deploy


def test_forward_and_backward() -> None:
    tensors = _tensors(8192, grad=True)
    weight = torch.randn(1, 8192, 16, 64, dtype=torch.bfloat16)

    def step(attend: Callable[..., Tensor], *more: HeadLayout) -> None:
        torch.autograd.grad(attend(*tensors, *more), tensors, weight)

    full = _seconds(lambda: step(_all_full), 2)
    ratio = _seconds(lambda: step(hybrid_attention, _deploy()), 2) / full
    print(f"forward and backward: {ratio:.3f} of all-full")
    assert ratio <= 0.45


def test_sliding_heads_cost_linear_time() -> None:
    layout = HeadLayout.deploy(0, 8, WINDOW)
    lengths = [2048, 8192, 32768]
    times = []
    for length in lengths:
        tensors = _tensors(length)
        times.append(_seconds(lambda: hybrid_attention(*tensors, layout)))  # noqa: B023
    x, y = ([math.log(v) for v in values] for values in (lengths, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope /= sum((a - mean_x) ** 2 for a in x)
    print(f"sliding heads: cost grows as T^{slope:.2f}")
    assert slope <= 1.1


def test_decoding_a_token() -> None:
    """Cache update and attention of one layer at T = 16,384, as in a model's decode step."""
    _, key, value = _tensors(16384)
    query, new_key, new_value = _tensors(1)
    original, hybrid, layout = DynamicCache(), HybridCache([_deploy()]), _deploy()
    original.update(key, value, 0)
    hybrid.update(key, value, 0)[0].settle(Span(16384))
    assert hybrid.num_bytes == 2 * 64 * 2 * (FULL * 16384 + (8 - FULL) * (WINDOW - 1))

    def original_step() -> None:
        _all_full(query, *original.update(new_key, new_value, 0))

    def hybrid_step() -> None:
        keys, values = hybrid.update(new_key, new_value, 0)
        span = Span(1, hybrid.get_seq_length() - 1)
        hybrid_attention(query, keys, values, layout, span)
        keys.settle(span)

    ratio = _seconds(hybrid_step, 20) / _seconds(original_step, 20)
    print(f"decoding: {ratio:.3f} of the original's attention")
    assert ratio <= 0.40
