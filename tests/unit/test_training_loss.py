"""The chunked training loss equals the model's own, without ever holding all logits."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bosch.model.materialize import materialize
from bosch.window import Window
from stages.train import loss as training_loss
from stages.train.loss import cross_entropy, head_loss, install_loss
from stages.train.model import recompute_activations
from tests.hybrid_case import mask_of, random_mask, small_config, small_model, tokens

WINDOW = 5
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch() -> dict[str, torch.Tensor]:
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, 3:5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    "family",
    [
        "qwen3", "gemma2", "gemma4", "cohere", "granite", "hyperclovax", "falcon_h1", "phi",
        "qwen3_moe",
    ],
)  # fmt: skip
def test_value_and_gradients_equal_the_models_own(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with scaled, capped and biased heads, in chunks that do not divide the tokens."""
    monkeypatch.setattr(training_loss, "chunk_tokens", lambda vocabulary: 5)
    base = small_model(family)
    model = materialize(base, mask_of(base.config, Window(WINDOW))).train()
    own = model(**batch(), use_cache=False).loss
    own.backward()
    expected = gradients(model)
    model.zero_grad()
    install_loss(model)
    chunked = model(**batch())["loss"]
    (3 * chunked).backward()
    assert chunked.item() == pytest.approx(own.item(), rel=1e-6)
    assert gradients(model).keys() == expected.keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient / 3, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_the_loss_of_a_step_that_predicts_nothing_is_0() -> None:
    model = small_model()
    install_loss(model)
    ids = tokens(2, 12)
    for count in (0, None):
        loss = model(ids, torch.full_like(ids, -100), num_items_in_batch=count)["loss"]
        loss.backward()
        assert loss.item() == 0 and not any(g.any() for g in gradients(model).values())


def test_all_logits_are_never_held_at_once() -> None:
    head, states = torch.nn.Linear(8, 1000, bias=True), torch.randn(64, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (64,))
    with LargestTensor() as whole:
        torch.nn.functional.cross_entropy(head(states), labels).backward()
    assert whole.elements == 64 * 1000
    with LargestTensor() as chunked:
        head_loss(head, states, small_config(), cross_entropy(labels), chunk=4).backward()
    assert chunked.elements == 8 * 1000  # the output head's weight and its gradient


def test_a_frozen_head_gets_no_gradient_but_the_states_do() -> None:
    head, states = torch.nn.Linear(8, 50), torch.randn(6, 8, requires_grad=True)
    head.requires_grad_(False)
    head_loss(head, states, small_config(), cross_entropy(torch.arange(6)), chunk=4).backward()
    assert head.weight.grad is None and states.grad is not None
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(head(states), torch.arange(6), reduction="sum"), states
    )[0]
    torch.testing.assert_close(states.grad, expected)


def test_bf16_heads_agree_with_float32_ones() -> None:
    torch.manual_seed(0)
    head, states = torch.nn.Linear(8, 50, bias=False), torch.randn(40, 8, requires_grad=True)
    labels = torch.randint(0, 50, (40,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head_loss(head, states, small_config(), cross_entropy(labels), chunk=4).backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32
    exact = torch.nn.functional.cross_entropy(head(states), labels, reduction="sum")
    expected = torch.autograd.grad(exact, [head.weight, states])
    torch.testing.assert_close(head.weight.grad, expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(states.grad, expected[1], rtol=0.05, atol=0.05)


def test_the_gradient_of_a_bf16_head_is_summed_in_float32() -> None:
    """Over chunks, as under FSDP. Summed in bf16, the last bits of 64 chunks would be lost."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False, dtype=torch.bfloat16)
    states, labels = torch.randn(640, 8, dtype=torch.bfloat16), torch.randint(0, 50, (640,))
    whole, chunked = (
        torch.autograd.grad(
            head_loss(head, states, small_config(), cross_entropy(labels), chunk=chunk), head.weight
        )[0]
        for chunk in (640, 10)
    )
    torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=0.02)


def fake_liger(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Liger whose fused loss is PyTorch's, since its kernels need a GPU; it counts its calls."""
    calls: list[int] = []

    def fused(
        states: Any,
        weight: Any,
        labels: Any,
        *,
        bias: Any,
        softcap: Any,
        accum_dtype: Any,
        **kw: Any,
    ) -> Any:
        assert accum_dtype == torch.float32
        calls.append(len(states))
        logits = torch.nn.functional.linear(states, weight, bias).float()
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return torch.nn.functional.cross_entropy(logits, labels, **kw)

    for name in (
        "liger_kernel",
        "liger_kernel.transformers",
        "liger_kernel.transformers.functional",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    functional: Any = sys.modules["liger_kernel.transformers.functional"]
    functional.liger_fused_linear_cross_entropy = fused
    return calls


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("liger", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_documents_stay_separate_with_every_option(
    masking: bool, liger: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masking, the loss is that of every document on its own."""
    calls = fake_liger(monkeypatch)
    model = materialize(small_model(), random_mask(Window(WINDOW))).train()
    ids = tokens(2, 12)
    rows = [row.split([5, 7]) if masking else [row] for row in ids]
    losses = [
        model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for row in rows for d in row
    ]
    expected = sum(losses) / sum(len(d) - 1 for row in rows for d in row)

    install_loss(model, liger=liger)
    if checkpointing:
        recompute_activations(model)
    labels = ids.clone()
    positions = None
    if masking:
        positions = PACKED
        labels[positions == 0] = -100
    loss = model(input_ids=ids, labels=labels, position_ids=positions)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert bool(calls) == liger
    assert model.get_decoder().embed_tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("family", "fused"),
    [("cohere", False), ("granite", False), ("gemma2", True), ("gemma4", True), ("phi", True)],
)
def test_liger_is_not_used_for_scaled_logits(
    family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It supports capped logits and a bias of the output head."""
    calls = fake_liger(monkeypatch)
    base = small_model(family)
    if fused:
        base.get_output_embeddings().weight.data *= 100
    model = materialize(base, mask_of(base.config, Window(WINDOW))).train()
    expected = model(**batch(), use_cache=False).loss.item()
    install_loss(model, liger=True)
    assert model(**batch())["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert bool(calls) == fused
