"""Sequences that are split over gloo processes: attention, losses and gradients as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bosch.model.families import split_fault
from tests.hybrid_case import SAMPLE, small_config
from tests.rank_processes import run_module
from tests.training_case import make_case, metrics, train_here, train_in_processes


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_attention_is_that_of_one_process(ranks: int) -> None:
    done = run_module("tests.split_attention", [], ranks)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} agrees" in done.stdout for rank in range(ranks))


def test_models_on_split_sequences_are_those_of_one_process() -> None:
    """Of every family whose sequences may be split, and whose attention is not another's."""
    families = [name for name in SAMPLE if split_fault(small_config(name)) is None]
    assert len(families) > 35
    done = run_module("tests.split_models", families, 2)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} agrees" in done.stdout for rank in range(2))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize(
    ("ranks", "split", "sharding", "train"),
    [
        (2, 2, "none", {"document_masking": True}),
        (4, 2, "fsdp", {"document_masking": True}),
        (4, 4, "fsdp", {"teacher": "original", "teacher_tokens": 0.5, "teacher_weight": 0.7}),
    ],
)
def test_training_on_split_sequences_is_that_of_one_process(
    case: Path, tmp_path: Path, ranks: int, split: int, sharding: str, train: dict[str, Any]
) -> None:
    """Of 32 tokens, 8 or 4 to a chunk, with a window of 6."""
    changes: dict[str, Any] = {
        "train": {**train, "total_tokens": 384, "checkpoint_tokens": []},
        "runtime": {"heldout_every_steps": 1, "heldout_sequences": 3, "micro_batch_size": 1},
    }
    train_here(case, tmp_path / "one", **changes)
    changes["runtime"] |= {
        "context_parallel": split, "sharding": sharding, "checkpointing": "full",
    }  # fmt: skip
    done = train_in_processes(case, tmp_path / "many", ranks, **changes)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(metrics(tmp_path / "many"), metrics(tmp_path / "one"), strict=True):
        for name in ("loss", "grad_norm", "heldout_loss", "heldout_by_position"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), (name, ours["step"])
