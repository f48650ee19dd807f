"""Memory of a process that shares examples with another, beside the formula that plans state.

    pytest -s tests/benchmarks/test_split_memory.py --override-ini addopts=

T = 2,048, W = 256, a random model with the proportions of an 8B: F = 3 C, 4 query heads to a KV
head, HQ x D = C. Bytes are those of all tensors alive at once (`tests/peak_memory.py`), messages
included, on the process with the most.
"""

from __future__ import annotations

import sys
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
from bosch.objective.calibration import CalibrationExample
from bosch.objective.gate_gradients import gate_gradients
from bosch.objective.incremental_forward import IncrementalForward
from bosch.objective.memory import activation_sizes
from bosch.window import Window
from tests.peak_memory import PeakMemory
from tests.rank_processes import run_module

pytestmark = pytest.mark.slow

LENGTH, LAYERS, HEADS, HIDDEN, WINDOW = 2048, 3, 2, 256, Window(256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_process_takes_what_the_plan_states(dtype: str) -> None:
    done = run_module(__name__, [dtype], 2)
    print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout


def main() -> None:
    """On each process; the assertions are those of one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    split = ContextParallel(dist.group.WORLD)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, head_dim=HIDDEN // 8, num_attention_heads=4 * HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).eval().to(getattr(torch, sys.argv[1]))
    prepare_for_search(model)
    ids = tuple(torch.randint(1000, (LENGTH,)).tolist())
    batch = batch_of([CalibrationExample(ids, 4)], [0])
    sizes = activation_sizes(model, sharing=split.ranks)
    forward = IncrementalForward(model, WINDOW, ActivationCache(LAYERS, 0), split=split)
    mask = HeadMask.all_full(LAYERS, HEADS)
    apply_head_mask(model, mask, WINDOW)
    split.install(model)
    with torch.inference_mode(), PeakMemory() as plain:
        forward.answer_states(0, batch, mask)
    with PeakMemory() as gradient:
        gate_gradients(model, batch, mask, forward.layouts, split=split)
    for name, peak, stated, most in (
        ("pass", plain.peak, sizes.plain_pass(LENGTH), 1.6),
        ("gradient", gradient.peak, sizes.gradient(1, LENGTH, WINDOW.size), 1.6),
    ):
        print(f"rank {split.messages.rank}, {sys.argv[1]}, {name}: {peak / 1e6:.1f} MB, "
              f"stated / peak {stated / peak:.2f}")  # fmt: skip
        assert 1 / 1.1 <= stated / peak <= most
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
