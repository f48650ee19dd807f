"""Training on two nodes of one host: one is killed, the other says so, and both resume.

What torchrun does with two nodes is in test_runner_processes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training_case import make_case, metrics, train_here, train_in_processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def test_a_lost_node_is_named_and_both_go_on_to_the_same_losses(case: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"runtime": {"sharding": "fsdp", "save_every_steps": 2}}
    killed = train_in_processes(
        case, tmp_path / "work", 2, kill_at_step=5, kill_rank=1, per_node=1, **changes
    )
    assert killed.returncode != 0
    said = "LostRankError: node 1 (process 1) of this run does not answer"
    assert said in killed.stderr, killed.stderr
    done = train_in_processes(case, tmp_path / "work", 2, per_node=1, **changes)
    assert done.returncode == 0, done.stderr
    assert "resuming from step-4" in done.stderr
    train_here(case, tmp_path / "alone")
    losses, alone = (
        [step["loss"] for step in metrics(tmp_path / name)] for name in ("work", "alone")
    )
    assert losses == pytest.approx(alone, rel=5e-4)
