"""AdamW with moments in 8 bits: what it holds, how it trains, and how it resumes after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stages.train.footprint import optimizer_bytes
from stages.train.optimizer import make_optimizer, set_learning_rate
from stages.train.stage import TrainConfig
from tests.training_case import make_case, metrics, train_here, train_in_processes

pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case whose MLPs are large enough for 8 bits, in each of two processes too."""
    return make_case(tmp_path_factory.mktemp("case"), hidden_size=64)


def test_bytes_are_those_of_the_plan_and_rates_do_not_compile_again() -> None:
    model = nn.Linear(128, 64, bias=False)
    train = TrainConfig(optimizer="adamw_8bit", adam_beta1=0.5, adam_beta2=0.7, weight_decay=0.3)
    optimizer: Any = make_optimizer(model, train)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.7), 0.3)
    with torch.compiler.set_stance("force_eager"):
        for rate in (1e-2, 1e-3):
            set_learning_rate(optimizer, rate)
            model(torch.randn(4, 128)).square().mean().backward()
            optimizer.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)
    (state,) = optimizer.state.values()
    moments = [state["exp_avg"], state["exp_avg_sq"]]
    held = sum(moment.codes.nbytes + moment.scale.nbytes for moment in moments)
    assert held == optimizer_bytes(128 * 64, 1, "adamw_8bit")
    assert 3.9 < optimizer_bytes(10**6, 4, "adamw") / optimizer_bytes(10**6, 4, "adamw_8bit") < 4


def test_losses_are_nearly_those_of_float32_moments(case: Path, tmp_path: Path) -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        with torch.compiler.set_stance("force_eager"):
            train_here(case, tmp_path / name, train={"optimizer": name})
        losses[name] = [step["loss"] for step in metrics(tmp_path / name)]
    assert losses["adamw_8bit"] != losses["adamw"]
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.02)
    assert losses["adamw"][-1] < 0.9 * losses["adamw"][0]


def test_training_resumes_after_a_kill(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than training
    changes = {"train": {"optimizer": "adamw_8bit"}, "runtime": {"sharding": "fsdp"}}

    def train(name: str, kill_at_step: int | None = None) -> Any:
        return train_in_processes(case, tmp_path / name, 2, kill_at_step, **changes)

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr
    assert train("killed", kill_at_step=5).returncode != 0
    assert len(metrics(tmp_path / "killed")) == 5
    again = train("killed")
    assert again.returncode == 0 and "resuming from step-4" in again.stderr, again.stderr
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
