"""Measured peak memory of each of two ranks in training, compared with what `plan` states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bosch.model.head_table import heads_by_window
from bosch.model.loading import load_config
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.train.footprint import TrainingJob, training_memory
from stages.train.loop import Loop
from stages.train.stage import TrainConfig
from tests.peak_memory import TensorBytes
from tests.training_case import main, train_in_processes, write_random_case

LENGTH, MICRO, RANKS = 256, 2, 2
SIZES = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "tie_word_embeddings": False, "max_position_embeddings": LENGTH,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
_ENDS = {"bos_token_id": None, "eos_token_id": 0}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and sequences of `LENGTH`."""
    return _case(tmp_path_factory, Qwen3ForCausalLM, Qwen3Config(**SIZES, **_ENDS))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts."""
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, **_ENDS)
    return _case(tmp_path_factory, Qwen3MoeForCausalLM, config)


def _case(tmp_path_factory: pytest.TempPathFactory, model_class: Any, config: Any) -> Path:
    torch.manual_seed(0)
    return write_random_case(
        tmp_path_factory.mktemp("case"), model_class(config), sliding=3, window=64, length=LENGTH
    )


_OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"teacher": "original"}, {"freeze": "attention_only"}, {"lora": {"rank": 4}}],
)


@_OPTIONS
@pytest.mark.parametrize(
    ("sharding", "checkpointing", "accumulation"),
    [
        ("fsdp", "full", 1),
        ("fsdp", "full", 2),
        ("fsdp", "attention", 1),
        ("fsdp", "none", 1),
        ("none", "full", 1),
    ],
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", ["case", "experts"])
def test_a_plan_is_within_10_percent_of_the_measured_peak(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, precision: str, sharding: str,
    checkpointing: str, accumulation: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """`no` is float32; bf16 is many times slower on a CPU without units for it."""
    folder = request.getfixturevalue(model)
    _check(folder, tmp_path, precision, sharding, checkpointing, accumulation, options)


@_OPTIONS
@pytest.mark.parametrize(
    ("sharding", "checkpointing"),
    [("fsdp", "full"), ("fsdp", "attention"), ("fsdp", "none"), ("none", "full")],
)
def test_a_plan_is_within_10_percent_of_the_measured_peak_of_split_sequences(
    case: Path, tmp_path: Path, sharding: str, checkpointing: str, options: dict[str, Any]
) -> None:
    """Each rank holds half of every sequence, but all keys of the full heads."""
    _check(case, tmp_path, "no", sharding, checkpointing, 1, options, context_parallel=RANKS)


def _check(
    case: Path, tmp_path: Path, precision: str, sharding: str, checkpointing: str,
    accumulation: int, options: dict[str, Any], context_parallel: int = 1,
) -> None:  # fmt: skip
    micro = MICRO * context_parallel  # as many tokens on each rank
    runtime: dict[str, Any] = {
        "sharding": sharding, "micro_batch_size": micro, "checkpointing": checkpointing,
        "context_parallel": context_parallel,
    }  # fmt: skip
    batch = accumulation * MICRO * RANKS * LENGTH
    train = {
        # Two steps: in the second one the moments are in place.
        "total_tokens": 2 * batch,
        "batch_tokens": batch,
        "checkpoint_tokens": [],
        "mixed_precision": precision,
        **options,
    }
    done = train_in_processes(
        case, tmp_path / "work", RANKS, module=f"{__name__}:measured", train=train, runtime=runtime
    )
    assert done.returncode == 0, done.stderr
    peaks = [int((tmp_path / "work" / f"peak.{rank}.json").read_text()) for rank in range(RANKS)]
    config = load_config(str(case / "materialize" / "model"))
    job = TrainingJob(
        DecoderShape.of(config), TrainConfig(**train), Runtime(**runtime), LENGTH,
        heads_by_window(config),
    )  # fmt: skip
    memory = training_memory(job, processes=RANKS, tokens=micro * LENGTH, accumulation=accumulation)
    print(memory.breakdown)
    print(f"planned {memory.peak / 2**20:.2f} MiB, measured {[p / 2**20 for p in peaks]}")
    for peak in peaks:
        assert memory.peak == pytest.approx(peak, rel=0.1)


def measured(*_: str) -> None:
    """On each rank: train, and write the peak of the bytes that tensors hold."""
    counted: list[TensorBytes] = []
    passes, write = Loop.forward_backward, Loop.write_checkpoint

    def forward_backward(self: Loop, *args: Any) -> float:
        if not counted:
            counted.append(TensorBytes())
            counted[0].__enter__()
        return passes(self, *args)

    def write_checkpoint(self: Loop, *args: Any) -> None:
        # After the last step: the copies for the files are in host memory, also with a GPU.
        counted[0].__exit__(None, None, None)
        write(self, *args)

    Loop.forward_backward = forward_backward  # type: ignore[method-assign]
    Loop.write_checkpoint = write_checkpoint  # type: ignore[method-assign]
    work_dir = main()
    (work_dir / f"peak.{os.environ['RANK']}.json").write_text(str(counted[0].peak))
