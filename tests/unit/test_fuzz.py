"""A few of the fuzzer's cases: `python -m tests.tools.fuzz` tries thousands."""

from __future__ import annotations

from tests.tools.fuzz import fuzz


def test_faulty_recipes_and_models_end_in_one_sentence_or_a_result() -> None:
    assert fuzz(range(60), seed=3) == []
