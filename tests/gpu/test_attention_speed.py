"""Hybrid attention on a GPU beside the best all-full kernel there is on it, and beside the ideal.

    pytest -s tests/gpu/test_attention_speed.py

Shapes of Qwen3-1.7B and Qwen3-8B, bf16, T = 32,768, W = 1,024, rho = 0.75, random tensors. The
ideal is the share of query-key pairs that is left. Skipped where there is no GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bosch.attention import hybrid_attention
from bosch.backends import BACKENDS, resolve_backend
from bosch.window import Window
from tests.attention_case import full_first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
LENGTH, WINDOW, RATIO = 32768, 1024, 0.75
ROUNDS = 7
_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _tensors(shape: str) -> tuple[list[Tensor], Tensor]:
    """Query [1, HQ, T, D], key and value [1, HKV, T, D], and a gradient of the output."""
    config = json.loads((SHAPES / shape / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, count, LENGTH, config["head_dim"], requires_grad=True, **options)
        for count in (heads, kv_heads, kv_heads)
    ]
    return tensors, torch.randn(1, LENGTH, heads, config["head_dim"], **options)


def _full_kernels() -> dict[str, Attention]:
    """Everything here that computes all-full causal attention."""

    def of_torch(kernel: SDPBackend) -> Attention:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if kernel is SDPBackend.EFFICIENT_ATTENTION:  # it has no grouped heads
                groups = query.shape[1] // key.shape[1]
                key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
                )
            return out.transpose(1, 2)

        return attend

    return {f"sdpa {kernel.name.lower()}": of_torch(kernel) for kernel in _KERNELS}


def _hybrid_kernels() -> dict[str, Attention]:
    layout = full_first(2, 8, Window(WINDOW))

    def kernel(backend: str) -> Attention:
        return lambda query, key, value: hybrid_attention(
            query, key, value, layout, backend=backend
        )

    names = [n for n, entry in BACKENDS.items() if entry.usable() and n != "eager"]
    return {f"hybrid {name}": kernel(name) for name in names}


def _milliseconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median of each; they take turns, after two rounds to compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS + 2):
        for name, work in works.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(spent[2:]) for name, spent in times.items()}


def _runs(attend: Attention, tensors: list[Tensor]) -> bool:
    """Whether a kernel takes these tensors, in both directions."""
    try:
        attend(*tensors).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        print(f"not available: {str(error).splitlines()[0]}")
        return False
    return True


@pytest.mark.parametrize("shape", ["qwen3_1p7b", "qwen3_8b"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward_and_backward"])
def test_hybrid_attention_is_near_the_ideal(shape: str, backward: bool) -> None:
    tensors, gradient = _tensors(shape)

    def work_of(attend: Attention) -> Callable[[], object]:
        if backward:
            return lambda: torch.autograd.grad(attend(*tensors), tensors, gradient)
        return lambda: attend(*(x.detach() for x in tensors))

    full = {n: work_of(a) for n, a in _full_kernels().items() if _runs(a, tensors)}
    hybrid = {n: work_of(a) for n, a in _hybrid_kernels().items()}
    times = _milliseconds({**full, **hybrid})
    best = min(times[name] for name in full)
    ideal = 1 - RATIO + RATIO * WINDOW * (2 * LENGTH - WINDOW) / LENGTH**2  # score entries
    print(
        f"\n{torch.cuda.get_device_name()}, {shape}, torch {torch.__version__}, ideal {ideal:.3f}"
    )
    for name, spent in times.items():
        print(f"  {name:<28}{spent:8.2f} ms  {spent / best:.3f} of the best all-full")
    assert times[f"hybrid {resolve_backend()}"] / best <= 1.25 * ideal
