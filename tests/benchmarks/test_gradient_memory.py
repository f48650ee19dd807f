"""Memory of a pass and of a gate gradient, beside the formula that plans state.

    pytest -s tests/benchmarks/test_gradient_memory.py

T = 2,048, random models. Bytes are those of all tensors alive at once (`PeakMemory` of
`bosch/objective/block_bytes.py`).

C is the hidden size, F that of the feed-forward part. One process: W = 1,024 and the proportions of
a 14B model: F = 3.4 C, 5 query heads to a KV head, HQ x D = C. The ratio of a gradient to a pass
includes the weights, as on a device. C is 640; at a 14B's 5,120, activations are a smaller part of
it. Two processes that share examples: W = 256 and the proportions of an 8B: F = 3 C, 4 query heads
to a KV head; the bytes of messages count, on each process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.heads import HeadMask
from bosch.model.context_parallel import ContextParallel
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.objective.activation_cache import ActivationCache
from bosch.objective.batches import batch_of
from bosch.objective.block_bytes import PeakMemory
from bosch.objective.calibration import CalibrationExample
from bosch.objective.gate_gradients import gate_gradients
from bosch.objective.incremental_forward import IncrementalForward
from bosch.objective.memory import activation_sizes
from bosch.window import Window
from tests.rank_processes import on_ranks

pytestmark = pytest.mark.slow

LENGTH, HEADS = 2048, 2


def _model(dtype: torch.dtype, layers: int, hidden: int, feed_forward: int, groups: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    query_heads = groups * HEADS
    config = Qwen3Config(
        vocab_size=1000, hidden_size=hidden, intermediate_size=feed_forward,
        num_hidden_layers=layers, head_dim=hidden // query_heads, num_attention_heads=query_heads,
        num_key_value_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).eval().to(dtype)
    prepare_for_search(model)
    return model


def _peaks(
    model: Any, mask: HeadMask, window: Window, split: ContextParallel | None = None
) -> tuple[PeakMemory, PeakMemory]:
    ids = tuple(torch.randint(1000, (LENGTH,)).tolist())
    batch = batch_of([CalibrationExample(ids, 4)], [0])
    apply_head_mask(model, mask, window)
    cache = ActivationCache(mask.num_layers, 0)
    forward = IncrementalForward(model, window, cache, answers_only=True, agree=bool, split=split)
    with torch.inference_mode(), PeakMemory() as plain:
        forward.answer_states(0, batch, mask)
    with PeakMemory() as gradient:
        gate_gradients(model, batch, mask, forward.layouts, recompute=True, split=split)
    return plain, gradient


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_takes_little_more_than_a_plain_pass(layers: int, dtype: torch.dtype) -> None:
    window = Window(1024)
    model = _model(dtype, layers, 640, 2176, 5)
    plain, gradient = _peaks(model, HeadMask.all_sliding(layers, HEADS), window)
    sizes = activation_sizes(model)
    state, weights = sizes.state(LENGTH), sum(p.nbytes for p in model.parameters())
    ratio = (weights + gradient.peak) / (weights + plain.peak)
    stated = sizes.gradient(1, LENGTH, window.size) / gradient.peak
    print(
        f"\n{layers} layers, {dtype}: plain {plain.peak / state:.1f} states (formula "
        f"{sizes.plain_pass(1, LENGTH) / state:.1f}), gradient {gradient.peak / state:.1f}, "
        f"formula / peak {stated:.2f}, with weights {ratio:.2f} x a plain pass"
    )
    assert ratio <= 1.5
    assert 1 <= stated <= 1.6
    # No matrix of T x T, no second feed-forward part: nothing larger than F values per token.
    widest = LENGTH * model.config.intermediate_size * 4
    assert plain.largest <= widest and gradient.largest <= widest
    assert plain.peak <= 1.1 * sizes.plain_pass(1, LENGTH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_process_that_shares_examples_takes_what_the_plan_states(dtype: str) -> None:
    print("\n" + on_ranks(2, f"{__name__}:measure_shared", dtype))


def measure_shared(dtype: str) -> None:
    """On each of two processes: the bounds on what the plan states, as for one process."""
    split, layers, window = ContextParallel(dist.group.WORLD), 3, Window(256)
    model = _model(getattr(torch, dtype), layers, 256, 768, 4)
    sizes = activation_sizes(model, sharing=split.ranks)
    split.install(model)
    plain, gradient = _peaks(model, HeadMask.all_full(layers, HEADS), window, split)
    for name, peak, stated in (
        ("pass", plain.peak, sizes.plain_pass(1, LENGTH)),
        ("gradient", gradient.peak, sizes.gradient(1, LENGTH, window.size)),
    ):
        print(f"rank {split.communicator.rank}, {dtype}, {name}: {peak / 1e6:.1f} MB, "
              f"stated / peak {stated / peak:.2f}")  # fmt: skip
        assert 1 / 1.1 <= stated / peak <= 1.6
