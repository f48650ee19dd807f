"""`bosch export layer_types`: transformers' own classes compute the exported hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.engines.layer_types import export
from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from tests.hybrid_case import KV_HEADS, small_model, tokens

WINDOW = 7
FULL, SLIDING = [0] * KV_HEADS, [WINDOW] * KV_HEADS
WHOLE = HeadMask([FULL, SLIDING, SLIDING])


def saved_hybrid(folder: Path, family: str, mask: HeadMask, **changes: Any) -> Path:
    """A small hybrid on disk; larger weights, so that a window shows in the logits."""
    base = small_model(family, **changes)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    materialize(base, mask).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "smollm3"])
def test_a_plain_class_computes_the_exported_hybrid(family: str, tmp_path: Path) -> None:
    hybrid = saved_hybrid(tmp_path / "hybrid", family, WHOLE)
    plain = export(hybrid, tmp_path / "plain")
    config = AutoConfig.from_pretrained(plain)
    assert config.model_type == family
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert not list(plain.glob("*.py")) and "auto_map" not in (plain / "config.json").read_text()
    ids = tokens(2, 5 * WINDOW)
    ours = load_model(hybrid, dtype="float32")(input_ids=ids).logits
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert config.architectures == [type(model).__name__]
    torch.testing.assert_close(model(input_ids=ids).logits, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mask", "fault"),
    [
        (HeadMask([FULL, [0, *SLIDING[1:]], FULL]), "granularity"),
        (HeadMask([FULL, SLIDING, [5] * KV_HEADS]), "one window"),
        (HeadMask(WHOLE.windows, 2), "without sinks"),
        (HeadMask.all_full(3, KV_HEADS), "no head of this model slides"),
    ],
)  # fmt: skip
def test_a_mask_that_layer_types_cannot_hold_is_refused(
    mask: HeadMask, fault: str, tmp_path: Path
) -> None:
    hybrid = saved_hybrid(tmp_path / "hybrid", "qwen3", mask)
    with pytest.raises(UserError, match=fault):
        export(hybrid, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_class_that_ignores_layer_types_is_refused(family: str, tmp_path: Path) -> None:
    """Llama's has no windows, and that of Qwen3's experts one for all layers."""
    hybrid = saved_hybrid(tmp_path / "hybrid", family, WHOLE)
    with pytest.raises(UserError, match=f"class of {family} does not compute this hybrid"):
        export(hybrid, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
