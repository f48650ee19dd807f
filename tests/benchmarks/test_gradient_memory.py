"""Memory of one gate gradient beside that of a plain pass, and beside the formula that plans state.

    pytest -s tests/benchmarks/test_gradient_memory.py --override-ini addopts=

T = 2,048, W = 1,024, a random model with the proportions of a 14B: F = 3.4 C, 5 query heads to a KV
head, HQ x D = C. Bytes are those of all tensors alive at once (`tests/peak_memory.py`);
the ratio is with the weights in memory, as a device holds them. C is 640: at 5,120 activations are
smaller part of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.heads import HeadMask
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.objective.activation_cache import ActivationCache
from bosch.objective.batches import batch_of
from bosch.objective.calibration import CalibrationExample
from bosch.objective.gate_gradients import gate_gradients
from bosch.objective.incremental_forward import IncrementalForward
from bosch.objective.memory import activation_sizes
from bosch.window import Window
from tests.peak_memory import PeakMemory

pytestmark = pytest.mark.slow

LENGTH, HEADS, WINDOW = 2048, 2, Window(1024)


def _model(dtype: torch.dtype, layers: int, hidden: int = 640) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=hidden, intermediate_size=hidden * 34 // 10,
        num_hidden_layers=layers, head_dim=hidden // 10, num_attention_heads=5 * HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).eval().to(dtype)
    prepare_for_search(model)
    return model


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_takes_little_more_than_a_plain_pass(layers: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    model = _model(dtype, layers)
    ids = tuple(torch.randint(1000, (LENGTH,)).tolist())
    batch = batch_of([CalibrationExample(ids, 4)], [0])
    mask = HeadMask.all_sliding(layers, HEADS)
    apply_head_mask(model, mask, WINDOW)
    forward = IncrementalForward(model, WINDOW, ActivationCache(layers, 0))
    with torch.inference_mode(), PeakMemory() as plain:
        forward.answer_states(0, batch, mask)
    with PeakMemory() as gradient:
        gate_gradients(model, batch, mask, forward.layouts)
    sizes = activation_sizes(model)
    state, weights = sizes.state(LENGTH), sum(p.nbytes for p in model.parameters())
    ratio = (weights + gradient.peak) / (weights + plain.peak)
    stated = sizes.gradient(1, LENGTH, WINDOW.size) / gradient.peak
    print(
        f"\n{layers} layers, {dtype}: plain {plain.peak / state:.1f} states (formula "
        f"{sizes.plain_pass(LENGTH) / state:.1f}), gradient {gradient.peak / state:.1f}, "
        f"formula / peak {stated:.2f}, with weights {ratio:.2f} x a plain pass"
    )
    assert ratio <= 1.5
    assert 1 <= stated <= 1.6
    # No matrix of T x T, no second feed-forward part: nothing larger than F values per token.
    widest = LENGTH * model.config.intermediate_size * 4
    assert plain.largest <= widest and gradient.largest <= widest
    assert plain.peak <= 1.1 * sizes.plain_pass(LENGTH)
