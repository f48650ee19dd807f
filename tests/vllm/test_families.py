"""Families that vLLM serves by classes of its own and by its transformers backend."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bosch.engines.layer_types import export
from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from tests.hybrid_case import KV_HEADS, small_model
from tests.tools.vllm_families import WINDOW, outcome, prepare, save_uneven
from tests.vllm_case import SIZES

FAMILIES = (
    "llama", "phi3", "olmo2", "gemma3_text", "granite", "mixtral", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(family: str) -> None:
    prepare()
    result = outcome(family, save_uneven)
    assert result.served, result


def save_plain(folder: Path, family: str) -> None:
    """Of three layers two slide; the export checks that transformers' own class computes this."""
    full, sliding = [0] * KV_HEADS, [WINDOW] * KV_HEADS
    hybrid = materialize(small_model(family, **SIZES).float(), HeadMask([full, sliding, sliding]))
    hybrid.save_pretrained(folder / "hybrid")
    shutil.copytree(export(folder / "hybrid", folder / "plain"), folder, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {"model_impl": "transformers"}), ("smollm3", {})]
)
def test_tokens_equal_transformers_far_beyond_the_window(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    prepare()
    result = outcome(family, save_plain, **options)
    assert result.served, result
