"""How a sequence is split over processes, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bosch.model.families import split_fault
from bosch.parallel.context import ContextSplit


def test_a_sequence_is_cut_into_two_chunks_for_each_process() -> None:
    with pytest.raises(ValueError, match="100 tokens cannot be cut into 8 chunks"):
        ContextSplit(100, 4)
    for ranks in (0, -1):
        with pytest.raises(ValueError, match="cannot be cut into"):
            ContextSplit(8, ranks)


QWEN3 = {
    "model_type": "qwen3", "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rope_scaling": {"rope_type": "yarn"}}, None),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE depends on the length"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "RoPE depends"),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "states pass from token"),
        ({"model_type": "gpt_oss"}, "positions that follow each other"),
        ({"text_config": SimpleNamespace(**QWEN3)}, "takes more than text"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    changes: dict[str, Any], reason: str | None
) -> None:
    fault = split_fault(SimpleNamespace(**{**QWEN3, **changes}))
    assert fault is None if reason is None else reason in str(fault)
