"""Liger's kernels give a hybrid's loss and gradients, family by family, in float32."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("liger_kernel")

import torch
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

from bosch.errors import RunError, UserError
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.train.loss import IGNORED, install_loss
from stages.train.model import apply_liger, use_grouped_experts
from tests.hybrid_case import FAMILY_NAMES, mask_of, small_model, tokens

FAMILIES = [name for name in FAMILY_NAMES if name in MODEL_TYPE_TO_APPLY_LIGER_FN]
# Liger leaves norms or MLPs of the first as they are, and names classes of the others that
# transformers 5.23 does not have.
REFUSED = (
    "gemma4", "gemma4_text", "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron", "olmo2",
    "olmo3",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip


def test_families_that_are_refused_are_families_of_liger() -> None:
    assert set(REFUSED) < set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_models_own_code(family: str) -> None:
    base = small_model(family)
    own = materialize(base, mask_of(base.config), Window(6, 1)).float().train()
    use_grouped_experts(own)
    patched = copy.deepcopy(own)
    if family in REFUSED:
        with pytest.raises((RunError, UserError), match=r"set train\.liger = false"):
            apply_liger(patched)
        return
    ids = tokens(2, 24)
    labels = ids.clone()
    labels[0, :5] = IGNORED
    losses = []
    for model in (own, patched):  # Liger's rotary embedding is that of all models from then on
        if model is patched:
            apply_liger(model)
        install_loss(model, liger=model is patched)
        loss = model(ids, labels=labels)["loss"]
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    for (name, one), two in zip(own.named_parameters(), patched.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            close = {"rtol": 1e-4, "atol": 1e-5 * float(one.grad.abs().max())}
            torch.testing.assert_close(two.grad, one.grad, **close, msg=lambda m, n=name: n + m)
