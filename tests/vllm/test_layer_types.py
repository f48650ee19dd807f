"""`bosch export layer_types`: vLLM serves the plain checkpoint, and needs no plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bosch.engines.layer_types import export
from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from tests.hybrid_case import KV_HEADS, small_model
from tests.vllm_case import (
    SIZES,
    engine,
    generate,
    largest_difference,
    load_reference,
    random_prompts,
)

WINDOW = 24


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {"model_impl": "transformers"}), ("smollm3", {})]
)
def test_tokens_equal_the_hybrids_far_beyond_the_window(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    full, sliding = [0] * KV_HEADS, [WINDOW] * KV_HEADS
    hybrid = materialize(small_model(family, **SIZES).float(), HeadMask([full, sliding, sliding]))
    hybrid.save_pretrained(tmp_path / "hybrid")
    plain = export(tmp_path / "hybrid", tmp_path / "plain")
    prompts = random_prompts((WINDOW, 200))
    with engine(plain, **options) as llm:
        outputs = generate(llm, prompts, 20)
    reference = load_reference(tmp_path / "hybrid")
    for prompt, output in zip(prompts, outputs, strict=True):
        distance, greedy = largest_difference(reference, prompt, output)
        assert distance < 1e-4 and greedy
