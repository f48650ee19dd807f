"""Layer-wise steps: their loss by hand, what they train, and a run that turns to predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bosch.model.interface import attention_modules
from bosch.model.loading import load_model
from bosch.score.decoder_shape import DecoderShape
from stages.train.cost import layer_wise_flops
from stages.train.layer_wise import LayerWiseLoss
from tests.hybrid_case import tokens
from tests.training_case import make_case, metrics, train_here, train_in_processes
from tests.unit.test_distillation import models

# Five of ten steps of 128 tokens.
TRAIN = {
    "teacher": "original", "layer_wise_tokens": 640, "checkpoint_tokens": [640],
    "learning_rate": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def error_by_hand(student: Any, base: Any, ids: torch.Tensor, sliding: list[int]) -> torch.Tensor:
    """Layer by layer and sequence by sequence, from the base model's inputs and outputs."""
    total = torch.zeros(())
    for row in ids:
        for layer in sliding:
            found: list[tuple[Any, torch.Tensor]] = []
            hook = attention_modules(base)[layer].register_forward_hook(
                lambda module, args, kwargs, output, found=found: found.append((kwargs, output[0])),
                with_kwargs=True,
            )
            with torch.no_grad():
                base(row[None], use_cache=False)
            hook.remove()
            kwargs, target = found[0]
            own = attention_modules(student)[layer](**{**kwargs, "attention_mask": None})[0]
            total = total + ((own - target) ** 2).sum() / (target**2).sum() / len(sliding)
    return total


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_loss_and_gradients_equal_those_by_hand(
    family: str, recomputes: bool, tmp_path: Path
) -> None:
    base, student, teacher = models(family, tmp_path)
    ids = tokens(3, 12)
    rows = student.config.hybrid_attention["windows"]
    sliding = [layer for layer, row in enumerate(rows) if any(row)]
    expected = error_by_hand(student, base, ids, sliding)
    expected.backward()
    plain = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    loss = LayerWiseLoss(student, teacher, recomputes)(ids, None)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trained = {name for name, p in student.named_parameters() if p.grad is not None}
    attention = {id(p) for module in attention_modules(student) for p in module.parameters()}
    assert trained == {name for name, p in student.named_parameters() if id(p) in attention}
    for name in trained:
        gradient = student.get_parameter(name).grad
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_layer_whose_heads_are_all_full_does_not_count(tmp_path: Path) -> None:
    """Its error would be 0, and lower the mean."""
    base, student, teacher = models("qwen3", tmp_path)
    windows = student.config.hybrid_attention["windows"]
    student.config.hybrid_attention["windows"] = [[0] * len(windows[0]), *windows[1:]]
    loss = LayerWiseLoss(student, teacher, False)
    sliding = list(range(1, len(windows)))
    expected = error_by_hand(student, base, tokens(1, 12), sliding)
    assert loss(tokens(1, 12), None).item() == pytest.approx(expected.item(), rel=1e-5)


def test_planned_operations_are_a_little_above_those_that_torch_counts(tmp_path: Path) -> None:
    _, student, teacher = models("qwen3", tmp_path)
    shape, ids = DecoderShape.of(student.config), tokens(4, 32)
    loss = LayerWiseLoss(student, teacher, False)
    operations = []
    for passes in (lambda: teacher(ids, None), lambda: loss(ids, None).backward()):
        with FlopCounterMode(display=False) as counter:
            passes()
        operations.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    scores = shape.training_flops(128, 32, {}) - 6 * 128 * shape.active_parameters
    planned = layer_wise_flops(shape, 128, 32, {}) - scores
    assert 0.75 * planned < operations[1] - operations[0] < planned


def test_a_run_trains_attention_first_and_resumes_in_the_middle(case: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    train_here(case, whole, train=TRAIN)
    records = metrics(whole)
    assert [record["loss"] is None for record in records] == [True] * 5 + [False] * 5
    errors = [record["attention_error"] for record in records[:5]]
    assert 0 < errors[4] < errors[0] < 1
    before = load_model(case / "materialize" / "model").state_dict()
    first = load_model(whole / "checkpoints" / "tokens-640").state_dict()
    changed = {name for name in before if not torch.equal(before[name], first[name])}
    assert changed == {name for name in before if "self_attn" in name}

    killed = tmp_path / "killed"
    changes = {"train": TRAIN, "runtime": {"save_every_steps": 1}}
    assert train_in_processes(case, killed, kill_at_step=3, **changes).returncode == -9
    assert train_in_processes(case, killed, **changes).returncode == 0
    assert metrics(killed) == records


@pytest.mark.parametrize(("sharding", "checkpointing"), [("none", "none"), ("fsdp", "full")])
def test_two_processes_train_as_one(
    sharding: str, checkpointing: str, case: Path, tmp_path: Path
) -> None:
    runtime = {"sharding": sharding, "checkpointing": checkpointing}
    train_here(case, tmp_path / "one", train=TRAIN)
    train_in_processes(case, tmp_path / "two", processes=2, train=TRAIN, runtime=runtime)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert two.keys() == one.keys()
        for name in ("attention_error" if one["loss"] is None else "loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), one["step"]
