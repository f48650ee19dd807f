"""Families that vLLM serves by classes of its own and by its transformers backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bosch.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "llama", "phi3", "olmo2", "gemma3_text", "granite", "mixtral", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result for each family's hybrid, by the command that tries all of them."""
    results = tmp_path_factory.mktemp("families") / "results.jsonl"
    subprocess.run(
        [sys.executable, "-m", "tests.tools.vllm_families", *FAMILIES, "--results", str(results)],
        cwd=ROOT, check=True,
    )  # fmt: skip
    entries = Journal(results).read_new(dict)
    return {e["key"]["family"]: e["result"] for e in entries if e["key"]["form"] == "hybrid"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(outcomes: dict[str, Any], family: str) -> None:
    assert outcomes[family]["served"], outcomes[family]["reason"]
