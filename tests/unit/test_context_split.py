"""How a sequence is split over processes: what each receives, what is refused, what plan states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.context_split import ContextSplit
from bosch.errors import UserError
from bosch.model.families import split_fault
from bosch.window import Window
from pipeline.recipe.load import load_recipe
from stages.exchange import pass_values
from tests.pipeline_case import Case


def _sent(split: ContextSplit, window: Window | None) -> int:
    """Token by token: the tokens that a rank's queries see and another rank holds."""
    owner = [
        min(slot // split.chunk, 2 * split.ranks - 1 - slot // split.chunk)
        for slot in range(split.length)
    ]
    received = set()
    for query in range(split.length):
        for key in range(query + 1):
            seen = window is None or query - key < window.size or key < window.sinks
            if seen and owner[key] != owner[query]:
                received.add((owner[query], key))
    return len(received)


@pytest.mark.parametrize(("length", "ranks"), [(24, 2), (48, 3), (64, 4), (12, 1)])
@pytest.mark.parametrize("window", [1, 2, 6, 8, 9, 20, 100])
@pytest.mark.parametrize("sinks", [0, 3, 20])
def test_traffic_is_what_queries_see_on_other_ranks(
    length: int, ranks: int, window: int, sinks: int
) -> None:
    split = ContextSplit(length, ranks)
    assert split.traffic(Window(window, sinks)) == _sent(split, Window(window, sinks))


def test_a_full_head_receives_all_keys_and_a_sliding_one_those_before_its_chunks() -> None:
    split = ContextSplit(65536, 4)
    assert split.traffic(None) == 3 * 65536
    assert split.traffic(Window(1024)) == 6 * 1023  # none before the first, one beside its own
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


def test_a_recipe_that_splits_such_a_model_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    options = ["runtime.context_parallel=2", "runtime.processes=2", "train.mixed_precision=bf16"]
    load_recipe(case.file, options, env={})
    case.change_config(attention_dropout=0.1)
    message = r"runtime\.context_parallel: .*attention dropout.*; set 1"
    with pytest.raises(UserError, match=message):
        load_recipe(case.file, options, env={})


@pytest.mark.parametrize(
    ("length", "ranks", "whole"), [(24, 2, 24), (25, 2, 28), (23, 3, 24), (1, 4, 8), (32, 4, 32)]
)
def test_a_sequence_is_padded_to_whole_chunks(length: int, ranks: int, whole: int) -> None:
    assert ContextSplit.padded(length, ranks) == ContextSplit(whole, ranks)


def test_bytes_sent_in_a_pass_worked_out_by_hand() -> None:
    """Of 24 tokens on two processes a full head is sent 12 twice, W = 4 three before two chunks."""
    split, window = ContextSplit(24, 2), Window(4)
    kinds = SimpleNamespace(head_dim=8, own_head_dim=16, own_heads=3, windows={})
    shape: Any = SimpleNamespace(kinds=kinds)
    rows = [{None: 1, window: 2}, {window: 3}]
    assert pass_values(shape, rows, split) == 2 * 8 * (24 + 5 * 6)
    kinds.windows = {1: 4, 5: 4}  # two layers that slide in the original
    assert pass_values(shape, rows, split) == 2 * 8 * (24 + 5 * 6) + 2 * (2 * 16 * 3 * 6)
