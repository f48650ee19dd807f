"""Attention modules of a served hybrid, its cache in bytes, and its weights on several ranks."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bosch.attention import HeadLayout
from bosch.errors import UserError
from bosch.model.families import FAMILIES
from bosch.vllm.checks import check_complete, check_engine, check_order, plan_of
from bosch.vllm.plan import any_mask, module_plan, rank_order, served_caches
from bosch.vllm.plugin import show_refusals_as_sentences
from bosch.vllm.weights import reorder_heads
from bosch.window import Window
from tests.hybrid_case import small_model
from tests.vllm_planner import RECORD, by_plan, cases

_ROWS = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]


def test_the_record_is_of_these_cases() -> None:
    assert [row["case"] for row in _ROWS] == cases()


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: str(row["case"]["num_key_value_heads"]))
def test_the_plan_predicts_what_vllms_planner_gives(row: dict[str, Any]) -> None:
    assert by_plan(row["case"]) == row["planner"]


def test_modules_have_as_many_heads_as_divide_all_counts() -> None:
    plan = module_plan([4, 8, 2], 8, [100] * 3)
    assert plan.kv_heads == 2
    assert plan.layers == ((None, None, 100, 100), (None,) * 4, (None, 100, 100, 100))


def test_an_original_model_needs_one_module_per_layer() -> None:
    plan = module_plan([8] * 36, 8, [1] * 36)
    assert plan.kv_heads == 8 and plan.layers == ((None,),) * 36
    # 36 layers, 8 heads, keys and values of 128 dimensions in two bytes.
    assert plan.request_bytes(32_768, 2 * 128 * 2) == 4608 * 2**20


def test_a_sliding_head_is_charged_its_window_the_tokens_in_flight_and_a_block() -> None:
    plan = module_plan([0], 1, [33])
    assert plan.blocks_per_request(tokens=10_000, block_size=16, tokens_in_flight=16) == 3 + 1
    assert plan.blocks_per_request(tokens=20, block_size=16, tokens_in_flight=16) == 2 + 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_have_equal_shares_with_full_heads_first(ranks: int) -> None:
    full, heads = 8, 16
    order = rank_order(full, heads, ranks)
    assert sorted(order) == list(range(heads))
    plan = module_plan([full], heads, [10], ranks)
    for rank in range(ranks):
        share = order[rank * heads // ranks : (rank + 1) * heads // ranks]
        kinds = [None if head < full else 10 for head in share]
        modules = [kind for kind in plan.layers[0] for _ in range(plan.kv_heads)]
        assert kinds == modules


@pytest.mark.parametrize(("counts", "ranks", "fitting"), [([4, 6], 4, 2), ([3, 8], 2, 1)])
def test_counts_that_ranks_cannot_share_are_refused(
    counts: list[int], ranks: int, fitting: int
) -> None:
    with pytest.raises(UserError, match=rf"tensor_parallel_size: .* serve on at most {fitting}"):
        module_plan(counts, 8, [10, 10], ranks)


def test_more_ranks_than_heads_each_hold_a_copy_of_one_head() -> None:
    plan = module_plan([2, 0], 2, [10, 10], ranks=8)
    assert plan.kv_heads == 1 and plan.layers == ((None,), (10,))
    with pytest.raises(UserError, match="8 ranks"):
        module_plan([1, 0], 2, [10, 10], ranks=8)
    with pytest.raises(UserError, match=r"3 ranks; choose a divisor of 8"):
        module_plan([8], 8, [10], ranks=3)


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2", "phi3", "gpt_oss", "cohere"])
def test_reordered_weights_are_the_same_function(family: str) -> None:
    """Any order of KV heads is the same model, as long as all that belongs to a head moves."""
    model = small_model(family)
    heads = model.config.num_key_value_heads
    generator = np.random.default_rng(0)
    orders = [generator.permutation(heads).tolist() for _ in range(model.config.num_hidden_layers)]
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        weights = dict(
            reorder_heads(model.state_dict().items(), FAMILIES[family], orders, model.config)
        )
        moved = [name for name, weight in model.state_dict().items() if weight is not weights[name]]
        model.load_state_dict({name: weight.clone() for name, weight in weights.items()})
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert any("o_proj" in name for name in moved)


def test_sinks_are_refused_in_one_sentence() -> None:
    layouts = [HeadLayout.deploy(2, 4, Window(16, 3))]
    with pytest.raises(UserError, match=r"hybrid_attention\.sinks is 3: .*sinks: 0"):
        plan_of(layouts, 1)
    # Sinks of a layer without sliding heads are never used.
    assert plan_of([HeadLayout.deploy(4, 4, Window(16, 3))], 1).layers == ((None,),)


def test_what_cannot_be_reordered_is_refused_on_several_ranks() -> None:
    layouts = [HeadLayout.deploy(2, 4, Window(16))]
    plain, quantised = SimpleNamespace(), SimpleNamespace(quantization_config={"bits": 4})
    check_order(layouts, 2, plain, None)
    check_order(layouts, 1, quantised, object())
    with pytest.raises(UserError, match=r"tensor_parallel_size is 2: .* quantised weights"):
        check_order(layouts, 2, quantised, None)
    with pytest.raises(UserError, match="LoRA adapters"):
        check_order(layouts, 2, plain, object())
    scaled = SimpleNamespace(quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    with pytest.raises(UserError, match="kv_cache_scheme"):
        check_order(layouts, 1, scaled, None)


def test_a_checkpoint_that_is_being_written_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors are missing; .*still being written"):
        check_complete(tmp_path)
    model = small_model("qwen3")
    model.save_pretrained(tmp_path)
    check_complete(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"its header asks for .*still being written"):
        check_complete(tmp_path)
    check_complete(tmp_path / "org/name-of-the-hub")


def test_every_number_of_ranks_has_figures_or_a_reason() -> None:
    caches = list(served_caches([4, 0, 8], 8, [1024] * 3, bytes_per_head=512))
    assert [(c.ranks, c.tokens) for c in caches] == [
        (ranks, tokens) for ranks in (1, 2, 4, 8) for tokens in (32_768, 131_072)
    ]
    for cache in caches:
        if cache.ranks == 8:
            assert "serve on at most 4" in cache.refusal and cache.hybrid == 0
        else:
            # Twelve of 24 heads are full; their cache alone is half of the original's.
            assert cache.original * cache.ranks == 24 * 512 * cache.tokens
            assert 0.5 * cache.original < cache.hybrid < 0.75 * cache.original


@given(
    heads=st.sampled_from([1, 2, 4, 6, 8, 32]),
    counts=st.lists(st.integers(0, 32), min_size=1, max_size=8),
)
def test_all_masks_of_a_budget_hold_the_same(heads: int, counts: list[int]) -> None:
    counts = [count % (heads + 1) for count in counts]
    windows = [1024] * len(counts)
    example = any_mask(sum(counts), len(counts), heads)
    assert sum(example) == sum(counts) and max(example) <= heads
    for cache, same in zip(
        served_caches(counts, heads, windows, 512), served_caches(example, heads, windows, 512),
        strict=True,
    ):  # fmt: skip
        if not cache.refusal:
            assert same == cache


@pytest.mark.parametrize(
    ("version", "arguments", "refused"),
    [
        ("0.32.0", ("per_layer_sliding_window",), False),
        ("0.32.1+cpu", ("per_layer_sliding_window",), False),
        ("0.32.0", (), True),
        ("0.33.0", ("per_layer_sliding_window",), True),
        ("0.3.2", ("per_layer_sliding_window",), True),
    ],
)
def test_an_engine_that_was_not_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, arguments: tuple[str, ...], refused: bool
) -> None:
    names = ("self", "num_heads", "num_kv_heads", "prefix", *arguments)
    Attention = type("Attention", (), {"__init__": eval(f"lambda {', '.join(names)}: None")})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    layers = "vllm.model_executor.layers.attention"
    for name in ("vllm.model_executor", "vllm.model_executor.layers", layers):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Attention=Attention))
    sentence = rf"vLLM {re.escape(version)}: .* install vllm~=0\.32\.0"
    with pytest.raises(UserError, match=sentence) if refused else nullcontext():
        check_engine()


def test_a_refusal_that_ends_the_process_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # vLLM calls the plugin again in the same process
        show_refusals_as_sentences()
    sys.excepthook(UserError, UserError("sinks is 3"), None)
    assert capsys.readouterr().err == "error: sinks is 3\n"
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "ValueError: another\n"
