"""Peak memory of scoring all heads by each static ranking, by the length of the example.

    pytest -s tests/benchmarks/test_static_memory.py

Each figure is from its own process: its peak memory while it scored, less what it held before, on
a random model of one layer (4 query heads, 2 KV heads, D = 16), W = 1,024, one thread.
The columns printed are 2k, 4k, 8k, 16k and 32k tokens, the figures MiB. One figure alone, in bytes:

    MALLOC_TRIM_THRESHOLD_=0 python -m tests.benchmarks.test_static_memory dcam 2048
"""

from __future__ import annotations

import sys

import pytest

from bosch.objective.calibration import CalibrationSet
from bosch.search.methods import METHODS
from stages.measure.process import memory_meter
from tests.rank_processes import printed_bytes

pytestmark = pytest.mark.slow

RANKINGS = ("dcam", "apl", "proxy", "qada", "razor", "fisher")
LENGTHS = (2048, 4096, 8192, 16384, 32768)
_MATRIX_BYTES = 4  # of one attention probability in float32


@pytest.mark.parametrize("method", RANKINGS)
def test_memory_grows_with_the_length_and_not_with_its_square(method: str) -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "0"}
    peaks = [printed_bytes("test_static_memory", method, str(n), **environment) for n in LENGTHS]
    figures = " | ".join(f"{peak / 2**20:,.0f}" for peak in peaks)
    print(f"\n| {method} | {figures} |")
    # Four times the length: four times the memory where it is linear, 16 times with a T x T matrix.
    assert peaks[-1] < 5.5 * max(peaks[-3], 2**20)
    assert peaks[-1] < LENGTHS[-1] ** 2 * _MATRIX_BYTES / 8


def _measure(method: str, length: int) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTHS[-1],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    score = METHODS[method].load()

    def score_example(tokens: int) -> None:
        ids = torch.randint(64, (tokens,)).tolist()
        score(model, CalibrationSet.from_records([(ids, 4)]), 1024)

    score_example(64)  # loads what is loaded only once
    meter = memory_meter(torch.device("cpu"))
    before = meter.peak()
    score_example(length)
    return meter.peak() - before


if __name__ == "__main__":
    print(_measure(sys.argv[1], int(sys.argv[2])))
