"""Monitoring of a training: divergence, speed, restart points, tokens on cards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from bosch.errors import RunError
from bosch.hardware import DEVICES, device_named
from bosch.model.loading import load_model
from bosch.score.decoder_shape import DecoderShape
from bosch.window import Window
from stages.context import Runtime
from stages.shape import stored_shape
from stages.stage import ModelInfo
from stages.train import loop as training_loop
from stages.train import run as training
from stages.train.loop import Loop, RestartTimer
from stages.train.loss import install_loss
from stages.train.metrics import peak_flops, step_flops
from stages.train.stage import TrainConfig
from stages.train.storage import RestartPoints
from tests.training_case import TRAIN, make_case, train_here


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def test_a_loss_that_is_not_finite_ends_training(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It first waits for the restart point that is being written."""
    publish, loss_of = RestartPoints.publish, Loop.loss_of

    def poisoned_loss(self: Loop, *args: Any) -> Any:
        return loss_of(self, *args) * (float("nan") if self.step == 3 else 1)

    def publish_late(self: RestartPoints, *args: Any) -> None:
        time.sleep(0.3)
        publish(self, *args)

    monkeypatch.setattr(RestartPoints, "publish", publish_late)
    monkeypatch.setattr(Loop, "loss_of", poisoned_loss)
    for _ in range(2):  # also after a resume
        with pytest.raises(RunError, match="diverged: loss is nan at step 3 "):
            train_here(case, tmp_path)
        assert (tmp_path / "restart" / "step-2").exists()
        assert not (tmp_path / "summary.json").exists()


def test_flops_of_a_step_are_those_of_its_heads(case: Path) -> None:
    """Three of the case's four KV heads slide, with a window of 6."""
    folder = case / "materialize" / "model"
    schedule = training.make_schedule(TrainConfig(**TRAIN), Runtime(), 32, 1, False)
    content = json.loads((folder / "config.json").read_text())
    shape = stored_shape(ModelInfo(content))
    expected = shape.training_flops(128, 32, {Window(6): 0.75})
    config = AutoConfig.from_pretrained(folder)
    assert step_flops(config, schedule, TrainConfig(**TRAIN)) == pytest.approx(expected)


def test_flops_of_a_step_are_those_that_torch_counts(case: Path) -> None:
    folder = case / "materialize" / "model"
    config, train = AutoConfig.from_pretrained(folder), TrainConfig(**TRAIN)
    schedule = training.make_schedule(train, Runtime(), 32, 1, False)
    model = load_model(folder, dtype=torch.float32)
    install_loss(model)
    ids = torch.zeros((4, 32), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids)["loss"].backward()
    shape = DecoderShape.of(config)
    # The few weights of norms count like those of linear maps.
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == pytest.approx(6 * 128 * shape.active_parameters, rel=1e-3)
    taught = train.model_copy(update={"teacher": "original"})
    more = step_flops(config, schedule, taught) - step_flops(config, schedule, train)
    assert more == pytest.approx(shape.forward_flops(128, 32))


def test_devices_are_recognised_by_their_drivers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in {
        "NVIDIA A800-SXM4-80GB": "a800", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L40S": "l40s",
    }.items():  # fmt: skip
        assert device_named(name) is DEVICES[key]
    # NVIDIA's data sheets, half of the figures for sparse products.
    for name, sparse in {
        "NVIDIA H100 PCIe": 1513, "NVIDIA H100 NVL": 1671, "NVIDIA H200 NVL": 1671,
        "NVIDIA GB200": 5000,
    }.items():  # fmt: skip
        device = device_named(name)
        assert device is not None and device.tflops == pytest.approx(sparse / 2, abs=1)
    for other in (
        "AMD EPYC cpu",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA H100 PCIe MIG 1g.10gb",
    ):
        assert device_named(other) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, peak in (("NVIDIA H100 80GB HBM3", 3 * 989e12), ("another", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert peak_flops(3) == peak


def test_minutes_until_a_restart_point_count_from_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every five steps of three minutes each, and after ten minutes without a point."""
    step = 0
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: 180.0 * step))
    runtime = Runtime(save_every_steps=5, save_every_minutes=10)
    timer, due = RestartTimer(runtime, torch.device("cpu")), []
    for step in range(1, 11):
        due += [step] * timer.decide(step)[0]
    assert due == [4, 5, 9, 10]


def test_a_checkpoints_card_counts_the_tokens_of_whole_steps(case: Path, tmp_path: Path) -> None:
    train_here(case, tmp_path, train={"checkpoint_tokens": [700, 1280]})
    card = (tmp_path / "checkpoints" / "tokens-700" / "README.md").read_text()
    assert "| continual pretraining | 768 tokens |" in card
