"""Bytes that training sends for split sequences, counted at torch.distributed, and its losses.

pytest -s tests/benchmarks/test_context_traffic.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.model.head_table import heads_by_window
from bosch.model.loading import load_config
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.train.footprint import TrainingJob, step_traffic
from stages.train.stage import TrainConfig
from tests.training_case import main, metrics, train_here, train_in_processes, write_random_case

LENGTH, BATCH, STEPS, WINDOW = 512, 2, 3, 16
HEADS = 4


def _case(directory: Path, sliding: int) -> Path:
    """Sequences of 512, and a model with `sliding` of 4 KV heads in each layer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=HEADS, head_dim=8, tie_word_embeddings=True,
        max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return write_random_case(directory, Qwen3ForCausalLM(config), sliding, WINDOW, LENGTH)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula_and_losses_those_of_one_process(
    tmp_path: Path, ranks: int
) -> None:
    train: dict[str, Any] = {
        "total_tokens": STEPS * BATCH * LENGTH, "batch_tokens": BATCH * LENGTH,
        "checkpoint_tokens": [], "mixed_precision": "no",
    }  # fmt: skip
    runtime = {"context_parallel": ranks, "checkpointing": "full", "micro_batch_size": 1}
    print(f"\n{'sliding heads':>13} {'bytes a step':>13} {'/ formula':>9} {'/ all full':>11}"
          f" {'largest difference of losses':>29}")  # fmt: skip
    all_full = 0.0
    for sliding in (0, 2, 3):
        case = _case(tmp_path / f"case-{sliding}", sliding)
        done = train_in_processes(
            case, tmp_path / f"split-{sliding}", ranks, module=f"{__name__}:counted",
            train=train, runtime=runtime,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        files = [tmp_path / f"split-{sliding}" / f"sent.{rank}" for rank in range(ranks)]
        sent = sum(int(file.read_text()) for file in files) / STEPS
        config = load_config(str(case / "materialize" / "model"))
        job = TrainingJob(
            DecoderShape.of(config), TrainConfig(**train), Runtime(**runtime), LENGTH,
            heads_by_window(config),
        )  # fmt: skip
        formula = step_traffic(job)
        train_here(case, tmp_path / f"one-{sliding}", train=train)
        split, alone = (metrics(tmp_path / f"{name}-{sliding}") for name in ("split", "one"))
        worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(split, alone, strict=True))
        all_full = all_full or sent
        print(
            f"{sliding:>8} of {HEADS} {sent:>13,.0f} {sent / formula:>9.3f} "
            f"{sent / all_full:>11.1%} {worst:>29.1e}"
        )
        assert formula <= sent <= 1.05 * formula
        assert worst < 1e-6


def counted(*_: str) -> None:
    """On each rank: train, and write the bytes it sent in calls that name a group.

    Those are sharding's and the loop's; what stays here does not count.
    """
    gather, exchange, sent = dist.all_gather_single, dist.all_to_all_single, [0]

    def all_gather(out: Any, own: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not None:
            sent[0] += out.nbytes - own.nbytes
        return gather(out, own, group=group, **kwargs)

    def all_to_all(out: Any, own: Any, to_me: Any, of_me: Any, group: Any = None) -> Any:
        rows = sum(count for rank, count in enumerate(of_me) if rank != dist.get_rank(group))
        sent[0] += own.nbytes // max(1, len(own)) * rows
        return exchange(out, own, to_me, of_me, group=group)

    dist.all_gather_single, dist.all_to_all_single = all_gather, all_to_all
    work_dir = main()
    (work_dir / f"sent.{os.environ['RANK']}").write_text(str(sent[0]))
