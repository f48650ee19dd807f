"""Families that vLLM serves by classes of its own and by its transformers backend."""

from __future__ import annotations

import pytest

from tests.tools.vllm_families import outcome, prepare, save_uneven

FAMILIES = (
    "llama", "phi3", "olmo2", "gemma3_text", "granite", "mixtral", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(family: str) -> None:
    prepare()
    result = outcome(family, save_uneven)
    assert result.served, result
