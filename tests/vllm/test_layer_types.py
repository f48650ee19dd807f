"""`bosch export layer_types`: vLLM serves the plain checkpoint, and needs no plugin."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bosch.engines.layer_types import export
from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from tests.hybrid_case import KV_HEADS, small_model
from tests.tools.vllm_families import WINDOW, outcome, prepare
from tests.vllm_case import SIZES


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
