"""Operations that reuse leaves of a search of Qwen3-14B at 32k, by the memory it may take.

    python -m tests.benchmarks.reuse_room [--rooms 0,2,8,30,60] [--kappa 10] [--method bosch]

The shape is real (40 layers, 8 KV heads, 8 examples of 32,768 tokens on each of 8 processes), the
tensors are torch's meta tensors, which have sizes and no memory, and the scores are a fixed random
function of the mask. The cache, its limit and the count of operations are those of a real search.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bosch.heads import HeadMask
from bosch.model.interface import HeadState, head_state, set_head_state
from bosch.objective import incremental_forward
from bosch.objective.activation_cache import ActivationCache
from bosch.objective.batches import batch_of
from bosch.objective.calibration import CalibrationExample
from bosch.objective.evaluation_log import Evaluation
from bosch.objective.incremental_forward import IncrementalForward
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from bosch.window import Window
from tests.attention_case import by_rows

LAYERS, HEADS, Q_PER_KV, HEAD_DIM, HIDDEN, WIDTH = 40, 8, 5, 128, 5120, 17408
LENGTH, EXAMPLES, WINDOW = 32768, 8, Window(1024)
_CONFIG = SimpleNamespace(
    num_hidden_layers=LAYERS, num_key_value_heads=HEADS, num_attention_heads=HEADS * Q_PER_KV,
    head_dim=HEAD_DIM, hidden_size=HIDDEN, model_type="qwen3",
)  # fmt: skip


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        query, key_value = HEADS * Q_PER_KV * HEAD_DIM, HEADS * HEAD_DIM
        self.q_proj, self.o_proj = _linear(HIDDEN, query), _linear(query, HIDDEN)
        self.k_proj, self.v_proj = _linear(HIDDEN, key_value), _linear(HIDDEN, key_value)
        set_head_state(self, HeadState(by_rows([True] * HEADS, WINDOW), "sdpa"))

    def forward(self, hidden_states: Tensor) -> None:
        hidden = hidden_states
        rows, length = hidden.shape[:2]
        state = head_state(self)
        if state.attend is not None:
            query = hidden.new_empty(rows, HEADS * Q_PER_KV, length, HEAD_DIM)
            key = hidden.new_empty(rows, HEADS, length, HEAD_DIM)
            state.attend(self, query, key, key, None, 1.0)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = _Attention()
        self.mlp = nn.ModuleList([_linear(HIDDEN, WIDTH) for _ in range(3)])

    def forward(self, hidden: Tensor) -> Tensor:
        self.self_attn(hidden_states=hidden)
        return torch.empty_like(hidden)


class _Model:
    """As much of a decoder as a pass of a search touches."""

    def __init__(self) -> None:
        self.config, self.device = _CONFIG, torch.device("meta")
        self.layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.head = _linear(HIDDEN, 151936)

    def get_decoder(self) -> _Model:
        return self

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def __call__(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        state = torch.empty(*input_ids.shape, HIDDEN, dtype=torch.bfloat16, device="meta")
        for layer in self.layers:
            state = layer(state)
        return SimpleNamespace(last_hidden_state=state)


class _Scorer:
    """Counts the operations of one process; scores are additive over the units, and fixed."""

    num_layers, num_key_value_heads, quantum = LAYERS, HEADS, 1 / 64

    def __init__(self, room: int) -> None:
        model = _Model()
        self.cache = ActivationCache(LAYERS, room)
        self.forward = IncrementalForward(model, WINDOW, self.cache)
        self.forward.verified = {"start", *(f"mixture {n}" for n in range(HEADS + 1))}
        example = CalibrationExample((0,) * LENGTH, 8)
        self.batches = [batch_of([example], [0]) for _ in range(EXAMPLES)]
        self.costs = np.random.default_rng(0).exponential(size=(LAYERS, HEADS))

    def evaluate(self, mask: HeadMask, shared_layers: int = 0, **options: Any) -> Evaluation:
        self.cache.begin(mask, shared_layers)
        operations = sum(
            self.forward.answer_states(index, batch, mask)[1]
            for index, batch in enumerate(self.batches)
        )
        flops = self.forward.flops
        full, whole = (
            EXAMPLES * flops.whole_pass(one, self.batches[0])
            for one in (HeadMask.all_full(LAYERS, HEADS), mask)
        )
        lost = float((self.costs * ~mask.is_full).sum() / self.costs.sum())
        score = round(64 * (1 - lost)) / 64
        return Evaluation(score, -lost, 0.0, operations / full, whole / full)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)


def _attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(query.transpose(1, 2))


def main() -> None:
    """Print a row for each size of room."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rooms", default="0,2,8,30,60", help="GiB per process")
    parser.add_argument("--kappa", type=int, default=10)
    parser.add_argument("--ratio", type=float, default=0.75)
    parser.add_argument("--method", default="bosch")
    options = parser.parse_args()
    # Meta tensors have no numbers to compute.
    incremental_forward.hybrid_attention = _attention
    settings = SearchSettings(
        options.ratio, solver="one_plus_one", budget_per_layer=options.kappa,
        tie_break="log_likelihood",
    )  # fmt: skip
    for room in options.rooms.split(","):
        scorer = _Scorer(int(float(room) * 2**30))
        with torch.inference_mode():
            costs = run_method(options.method, scorer, settings).costs
        work, naive = costs["full_forward_equivalents"], costs["naive_full_forward_equivalents"]
        sys.stdout.write(
            f"{options.method}, {room} GiB: {work:.1f} of {naive:.1f} passes, {work / naive:.3f} "
            f"left, {scorer.cache.peak_bytes / 2**30:.1f} GiB used\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
