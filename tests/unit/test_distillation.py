"""Distillation from the full-attention model: its value, gradients and memory, and what is frozen.

Every value is compared with a plain loop over whole logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bosch.model.materialize import materialize
from bosch.window import Window
from stages.context import ModelConfig, Runtime
from stages.train import distillation
from stages.train.distillation import TeacherLoss, load_teacher
from stages.train.loss import install_loss
from stages.train.model import load_for_training
from stages.train.stage import TrainConfig
from tests.hybrid_case import (
    mask_of,
    small_config,
    small_model,
    tokens,
)
from tests.training_case import make_case, metrics, train_here, train_in_processes
from tests.unit.test_training_loss import LargestTensor, gradients

WINDOW = 5
CPU = torch.device("cpu")
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small case with larger weights, so that sliding heads matter."""
    folder = make_case(tmp_path_factory.mktemp("case"))
    file = folder / "materialize" / "model" / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        if "proj" in name:
            value *= 10
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def teacher_of(folder: Path) -> Any:
    """The teacher loaded from a hybrid's directory."""
    train = TrainConfig(mixed_precision="no")
    return load_teacher(folder, ModelConfig(path="unused"), train, Runtime(), CPU)


def models(family: str, folder: Path) -> tuple[Any, Any, Any]:
    """A small base model, its hybrid, and the teacher loaded from the hybrid's directory."""
    base = small_model(family).eval()
    logits_of_base = AutoModelForCausalLM.from_config(base.config)
    logits_of_base.load_state_dict(base.state_dict())
    hybrid = materialize(base, mask_of(base.config, Window(WINDOW)))
    hybrid.save_pretrained(folder)
    return logits_of_base.eval(), hybrid.train(), teacher_of(folder)


def divergences(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of each token."""
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def plain_loss(student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of logits [B, T, V] and next tokens [B, T], a row at a time."""
    total = torch.zeros(())
    for own, other, labels in zip(student, teacher, targets, strict=True):
        predicted = labels != -100
        total = total + divergences(own, other)[predicted].sum()
    return total / (targets != -100).sum()


@pytest.mark.parametrize(
    ("family", "packed"), [("qwen3", True), ("gemma2", False), ("cohere", True)]
)
def test_value_and_gradients_equal_those_of_whole_logits(
    family: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that do not divide the tokens; also with heads that cap or scale logits."""
    monkeypatch.setattr(distillation, "chunk_tokens", lambda vocabulary, distilled: 5)
    base, student, teacher = models(family, tmp_path)
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, 3:5] = -100
    positions = PACKED if packed else None
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        if packed:
            parts = [base(part).logits for part in ids.split([5, 7], dim=1)]
            full = torch.cat(parts, dim=1)
        else:
            full = base(ids).logits
    own = student(input_ids=ids, position_ids=positions, use_cache=False).logits
    expected = plain_loss(own, full, targets)
    expected.backward()
    plain = gradients(student)
    student.zero_grad()
    install_loss(student, distillation=TeacherLoss(teacher))
    caches: list[Any] = []
    teacher.get_decoder().register_forward_hook(
        lambda *call: caches.append(call[2].past_key_values)
    )
    loss = student(input_ids=ids, labels=labels, position_ids=positions)["loss"]
    loss.backward()
    assert caches == [None]
    # Log-probabilities of about 4 are rounded by 2e-7 each, on another machine differently.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert gradients(student).keys() == plain.keys()
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6, msg=name)
    assert all(parameter.grad is None for parameter in teacher.parameters())


class Stub(torch.nn.Module):
    """A teacher of 1,000 words that returns the given states."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.head, self.states, self.config = torch.nn.Linear(8, 1000), states, small_config()

    def forward(self, input_ids: torch.Tensor, position_ids: None) -> torch.Tensor:
        return self.states

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_a_teacher_in_bf16_may_end_with_a_norm_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU autocast computes torch's layer norms in float32, the last one's states too."""
    base = small_model("gpt_neox")
    materialize(base, mask_of(base.config, Window(WINDOW))).save_pretrained(tmp_path)
    train, unused = TrainConfig(mixed_precision="bf16"), ModelConfig(path="unused")
    ids = tokens(2, 12)
    layer_norm = torch.nn.functional.layer_norm
    losses, teacher_states = [], []
    for as_on_gpu in (False, True):
        if as_on_gpu:
            monkeypatch.setattr(
                torch.nn.functional, "layer_norm",
                lambda values, shape, weight, bias, eps: layer_norm(
                    values.float(), shape, weight.float(), bias.float(), eps
                ),
            )  # fmt: skip
        teacher = load_teacher(tmp_path, unused, train, Runtime(), CPU)
        teacher.get_decoder().register_forward_hook(
            lambda *call: teacher_states.append(call[2].last_hidden_state.dtype)
        )
        student = load_for_training(
            tmp_path, unused, train, Runtime(), distillation=TeacherLoss(teacher)
        )
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(student(input_ids=ids, labels=ids)["loss"].item())
    assert teacher_states == [torch.bfloat16, torch.float32]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_no_model_computes_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "chunk_tokens", lambda vocabulary, distilled: 4)
    head, states = torch.nn.Linear(8, 1000), torch.randn(64, 8, requires_grad=True)
    targets = torch.randint(0, 1000, (2, 32))
    teacher = TeacherLoss(Stub(torch.randn(2, 32, 8)))
    with LargestTensor() as held:
        teacher(small_config(), targets, targets, None)(head, states).backward()
    assert held.elements == 8 * 1000  # the output head's weight and its gradient
    assert states.grad is not None


def test_training_with_a_teacher_resumes_after_a_kill(case: Path, tmp_path: Path) -> None:
    train = {"teacher": "original", "learning_rate": 3e-3}
    train_here(case, tmp_path / "whole", train=train)
    losses = [step["loss"] for step in metrics(tmp_path / "whole")]
    assert losses[0] > 1e-3 and len(losses) == 10
    train_in_processes(case, tmp_path / "killed", kill_at_step=5, train=train)
    train_here(case, tmp_path / "killed", train=train)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
