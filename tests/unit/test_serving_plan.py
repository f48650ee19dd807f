"""Attention modules of a served hybrid, its cache in bytes, and its weights on several ranks."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bosch.engines.vllm import cache_settings, checks, plugin
from bosch.engines.vllm.checks import check_complete, check_engine, check_order
from bosch.engines.vllm.groups import groups_of_modules, module_name
from bosch.engines.vllm.plan import (
    Module,
    ModulePlan,
    Request,
    batch_tokens,
    module_plan,
    packed_groups,
    rank_order,
    request_bytes,
    served_tokens,
)
from bosch.engines.vllm.plugin import show_user_errors_as_messages
from bosch.errors import UserError
from bosch.model.families import DecoderLayers
from bosch.window import Window
from tests.attention_case import full_first
from tests.hybrid_case import small_model
from tests.tools.vllm_planner import RECORD, bytes_by_plan, cases, two_kinds

REQUEST = Request(32 * 1024, 16, 2048)
_ROWS = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]


def test_the_recorded_cases_are_those_of_this_file() -> None:
    assert [row["case"] for row in _ROWS] == cases()


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: str(row["case"]["num_key_value_heads"]))
def test_the_plan_equals_vllms_planner_in_all_recorded_cases(row: dict[str, Any]) -> None:
    assert bytes_by_plan(row["case"]) == row["request_bytes"]


def plan_of_counts(counts: list[int], heads: int, window: int = 40, **options: Any) -> ModulePlan:
    """For one of vLLM's long requests, with two concurrent steps of 1,024 tokens."""
    return module_plan(two_kinds(counts, heads, [window] * len(counts)), REQUEST, **options)


@pytest.mark.parametrize(
    ("counts", "kinds", "groups"),
    [
        # Whole layers: vLLM's own case.
        ([0, 0, 0, 8] * 9, {(None, 8): 9, (1024, 8): 27}, 4),
        ([2] * 36, {(None, 2): 36, (1024, 6): 36}, 2),
        # One odd layer, whose own kinds would make groups of one module.
        ([1, *[0, 0, 0, 8] * 9], {(None, 4): 19, (1024, 8): 19, (1024, 4): 18}, 3),
    ],
)  # fmt: skip
def test_modules_are_few_and_fill_their_groups(
    counts: list[int], kinds: dict[tuple[int | None, int], int], groups: int
) -> None:
    plan = plan_of_counts(counts, 8, 1024)
    assert (plan.kinds, plan.pool(REQUEST).groups) == (kinds, groups)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_mask_of_eight_heads_needs_few_modules(seed: int) -> None:
    """Qwen3-8B, of whose heads 72 are full: 288 modules of one head were 4 groups of 72."""
    full = np.random.default_rng(seed).permutation(36 * 8).reshape(36, 8) < 72
    plan = plan_of_counts(full.sum(1).tolist(), 8, 1024)
    held = 72 * REQUEST.tokens + 216 * 1023
    pool = plan.pool(REQUEST)
    assert plan.kinds.total() <= 132 and pool.groups <= 6 and pool.reserved < 1.25 * held


def test_modules_in_own_groups_are_not_cut() -> None:
    assert plan_of_counts([1, 3, 0], 4, own_groups=True).modules == (
        (Module(None, 0, 1), Module(40, 1, 3)),
        (Module(None, 0, 3), Module(40, 3, 1)),
        (Module(40, 0, 4),),
    )


def test_groups_are_filled_from_the_largest_module_down() -> None:
    """In another order, a block of two heads would have no room for two and one."""
    modules, blocks = {None: [1, 1, 2], 10: [2]}, {None: 10, 10: 10}
    assert packed_groups(modules, blocks) == (2, {None: [[2], [0, 1]], 10: [[0]]})


def check_ranks(plan: Any, layers: Any, ranks: int, heads: int) -> None:
    """Every head has its window on its rank, from one module."""
    shards = min(ranks, heads)
    for layer, counts in enumerate(layers):
        own = [window for window, count in counts.items() for _ in range(count)]
        order = rank_order(plan, layer)
        assert sorted(order) == list(range(heads))
        modules = plan.modules[layer]
        for rank in range(ranks):
            first = rank * shards // ranks * heads // shards
            share = order[first : first + heads // shards]
            used = plan.used(layer, rank)
            assert [head for part in used for head in part] == list(range(len(share)))
            for (window, start, size), part in zip(modules, used, strict=True):
                assert start >= 0 and start + size <= len(share)
                assert all(start <= head < start + size for head in part)
                assert {own[share[head]] for head in part} <= {window}


@given(
    heads=st.sampled_from([1, 2, 4, 6, 8, 32]),
    ends=st.lists(st.tuples(st.integers(0, 32), st.integers(0, 32)), min_size=1, max_size=6),
    several=st.booleans(),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    own_groups=st.booleans(),
)
def test_every_rank_has_the_same_caches_and_each_head_its_own_window(
    heads: int, ends: list[tuple[int, int]], several: bool, ranks: int, own_groups: bool
) -> None:
    """With one window and with two."""
    assume(max(ranks, heads) % min(ranks, heads) == 0)
    layers: list[dict[int | None, int]] = []
    for pair in ends:
        first, second = sorted(end % (heads + 1) for end in pair)
        own = {64: second - first, 10: heads - second} if several else {10: heads - first}
        layers.append({None: first, **own})
    plan = module_plan(layers, REQUEST, ranks, own_groups)
    check_ranks(plan, layers, ranks, heads)
    sizes = {size for _, size in plan.kinds}
    assert own_groups or not any(max(sizes) % size for size in sizes)
    assert plan.sliding_windows <= {64, 10}


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 ranks; choose a divisor of 8"):
        plan_of_counts([8], 8, ranks=3)


@pytest.mark.parametrize(
    ("windows", "sequences", "expected"),
    [
        ({64}, 1, 256), ({4096}, 1, 2048), ({1024, 4096}, 1, 1024), (set(), 1, 2048),
        ({64}, 1000, 1000), ({64}, 4000, 2048),
    ],
)  # fmt: skip
def test_the_tokens_of_a_step_follow_the_smallest_window(
    windows: set[int], sequences: int, expected: int
) -> None:
    assert batch_tokens(windows, 2048, sequences) == expected


def test_bytes_of_a_request_are_those_of_its_blocks() -> None:
    """Twelve of 24 heads are full; a sliding one holds 1,023 tokens and 2,048 in flight."""
    kinds = DecoderLayers(3, (0, 1, 2), heads=8, head_dim=64)
    rows = [{None: full, Window(1023): 8 - full} for full in (4, 0, 8)]
    sliding = 12 * 512 * (-(-(1023 + 2048) // 16) + 1) * 16
    assert request_bytes(rows, kinds, 4, 32_768) == 12 * 512 * 32_768 + sliding
    assert request_bytes([{None: 8}] * 3, kinds, 4, 32_768) == 24 * 512 * 32_768
    assert request_bytes([{None: 4, Window(9, 1): 4}] * 3, kinds, 4, 32_768) is None
    assert request_bytes(rows, replace(kinds, states={0: 1}), 4, 32_768) is None


def test_requests_are_as_long_as_the_model_allows() -> None:
    assert served_tokens(2048) == (2048,)
    assert served_tokens(32_768) == (32_768,)
    assert served_tokens(40_960) == (32_768, 40_960)
    assert served_tokens(None) == (32_768, 131_072)


def test_sinks_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [full_first(4, 4, Window(16, 3)), full_first(2, 4, Window(16, 3))]
    monkeypatch.setattr(checks, "served_layouts", lambda config: dict(enumerate(layouts)))
    monkeypatch.setattr(checks, "own_groups", lambda config: False)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=None, max_model_len=2048),
        cache_config=SimpleNamespace(block_size=16), max_in_flight_tokens=512,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"hybrid_attention\.sinks is 3: .*no sinks before it"):
        checks.plan_of(config)
    # A layer without sliding heads does not use its sinks.
    del layouts[1]
    assert checks.plan_of(config).modules == ((Module(None, 0, 4),),)


def test_weights_that_cannot_be_reordered_are_refused_on_several_ranks() -> None:
    plain, quantised = SimpleNamespace(), SimpleNamespace(quantization_config={"bits": 4})
    one, two = (plan_of_counts([2], 4, ranks=ranks) for ranks in (1, 2))
    check_order(two, plain, None)
    check_order(one, quantised, object())
    with pytest.raises(UserError, match=r"tensor_parallel_size is 2: .* quantised weights"):
        check_order(two, quantised, None)
    with pytest.raises(UserError, match="LoRA adapters"):
        check_order(two, plain, object())
    scaled = SimpleNamespace(quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    with pytest.raises(UserError, match="kv_cache_scheme"):
        check_order(one, scaled, None)


def test_a_checkpoint_that_is_being_written_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors are missing; .*still being written"):
        check_complete(tmp_path)
    small_model("qwen3").save_pretrained(tmp_path)
    check_complete(tmp_path)
    check_complete(tmp_path / "org/name-of-the-hub")


def serve_two_layers(patch: pytest.MonkeyPatch, cpu: bool) -> None:
    """Give the engine's model two layers of eight heads, with the others sliding."""
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
    patch.setitem(sys.modules, "vllm.platforms", platforms)
    patch.setattr(cache_settings, "plan_of", lambda config: plan_of_counts([1, 1], 8, 64))


_BOTH = ("max_num_batched_tokens", "max_num_seqs")


@pytest.mark.parametrize(
    ("cpu", "said", "mode", "chosen"),
    [
        (True, (), "balanced", (256, 256, 32)),
        (False, (), "balanced", (256, 256, 16)),
        (False, _BOTH[:1], "balanced", (8192, 1024, 16)),
        (False, _BOTH[1:], "balanced", (1024, 1024, 16)),
        (False, (), "throughput", (8192, 1024, 16)),
        (False, _BOTH, "balanced", (8192, 1024, 16)),
    ],
)
def test_the_plugin_sets_only_options_that_the_user_left_out(
    cpu: bool,
    said: tuple[str, ...],
    mode: str,
    chosen: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_two_layers(monkeypatch, cpu)
    scheduler = SimpleNamespace(
        max_num_batched_tokens=8192, max_num_seqs=1024, enable_chunked_prefill=True
    )
    cache = SimpleNamespace(block_size=16, user_specified_block_size=False)
    config = SimpleNamespace(
        scheduler_config=scheduler, cache_config=cache, performance_mode=mode,
        num_speculative_tokens=0,
    )  # fmt: skip

    class Arguments:
        max_num_batched_tokens = 8192 if _BOTH[0] in said else None
        max_num_seqs = 1024 if _BOTH[1] in said else None

        def create_engine_config(self) -> None:
            cache_settings.choose_cache_settings(config)

    cache_settings.wrap(Arguments, "create_engine_config", cache_settings.recording_options)
    Arguments().create_engine_config()
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, cache.block_size) == chosen


@pytest.mark.parametrize(
    ("configured", "variable", "expected"),
    [
        (None, None, False),
        ("BOTH", None, True),
        (None, "BOTH", True),
        ("COMPACT", "BOTH", False),
        ("OUTERMOST", None, False),
        ("UNKNOWN", None, False),
    ],
)
def test_unequal_modules_need_compact_blocks_that_are_outermost(
    configured: str | None, variable: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = {
        name: SimpleNamespace(is_block_outermost=outermost, is_block_compact=compact)
        for name, outermost, compact in (
            ("BOTH", True, True), ("OUTERMOST", True, False), ("COMPACT", False, True)
        )
    }  # fmt: skip
    interfaces, vllm = SimpleNamespace(), SimpleNamespace()
    vllm.envs = SimpleNamespace(VLLM_KV_CACHE_LAYOUT=variable)
    kinds = SimpleNamespace(KVCacheLayout=SimpleNamespace(__members__=layouts))
    for name, module in (
        ("vllm", vllm),
        ("vllm.model_executor.models", SimpleNamespace(interfaces=interfaces)),
        ("vllm.v1.kv_cache_interface", kinds),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=configured))
    assert not checks.own_groups(config), "an engine that takes no groups of ours"
    interfaces.SupportsKVCacheGrouping = object
    assert checks.own_groups(config) == expected


@pytest.mark.parametrize(
    ("is_off", "draft", "ours"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_modules_of_one_kind_share_our_groups(
    is_off: bool, draft: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec(NamedTuple):
        num_kv_heads: int
        sliding_window: int | None = None
        page_size_bytes: int = 10

        def max_memory_usage_bytes(self, config: object) -> int:
            return 80 if self.sliding_window is None else 20

    planning = SimpleNamespace(
        get_kv_cache_groups=lambda config, specs: ["vLLM's own"],
        create_kv_cache_group_specs=lambda specs, groups: [("equal", *names) for names in groups],
    )
    interface = SimpleNamespace(
        KVCacheGroupSpec=lambda names, specs: ("unequal", *names, specs),
        UniformTypeKVCacheSpecs=SimpleNamespace(from_specs=list),
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_planning", planning)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", interface)
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=is_off)
    specs = {module_name("a", 0): Spec(1), module_name("a", 1): Spec(2, 9),
             module_name("b", 0): Spec(3), module_name("b", 1): Spec(2, 9)}  # fmt: skip
    if draft:
        specs["draft.attention"] = Spec(4)
    found = groups_of_modules(SimpleNamespace(scheduler_config=scheduler), specs)
    # A group of each kind with four heads leaves no memory unused.
    groups = [("unequal", "a.module0", "b.module0", ["a.module0", "b.module0"]),
              ("equal", "a.module1", "b.module1")]  # fmt: skip
    assert found == (groups if ours else ["vLLM's own"])


def test_the_plugin_checks_before_and_sets_options_after_the_familys_own_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[str, str] = {}
    called: list[str] = []

    def hook(name: str) -> type:
        def verify(cls: type, config: object) -> None:
            called.append(name)

        return type(name, (), {"verify_and_update_config": classmethod(verify)})

    monkeypatch.setattr(plugin, "CAUSAL", {"one": "One"})
    monkeypatch.setattr(plugin, "IMAGES", {"one": "One", "two": "Two"})
    hooks = {"One": hook("its own")}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    config = SimpleNamespace(MODELS_CONFIG_MAP=hooks, VerifyAndUpdateConfig=hook("vLLM's"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", config)
    for name in ("wrap_engine", "reorder_base_adapters", "show_user_errors_as_messages"):
        monkeypatch.setattr(plugin, name, lambda: None)
    for name in ("check_servable", "choose_cache_settings"):
        monkeypatch.setattr(plugin, name, lambda config, name=name: called.append(name))
    plugin.register()
    served = ("HybridOne", "HybridTwo")
    assert registered == {name: f"bosch.engines.vllm.models:{name}" for name in served}
    for name, own in zip(served, ("its own", "vLLM's"), strict=True):
        called.clear()
        hooks[name].verify_and_update_config(None)
        assert called == ["check_servable", own, "choose_cache_settings"]


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.3.2", False), ("0.34.0rc1", False)],
)
def test_an_untested_version_gives_a_warning(
    version: str,
    tested: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm.bosch"), "propagate", True)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    check_engine()
    warned = [record.getMessage() for record in caplog.records]
    assert [f"vLLM {version}: " in message for message in warned] == [True] * (not tested)


def test_a_refusal_that_ends_the_process_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # vLLM calls the plugin again in the same process
        show_user_errors_as_messages()
    sys.excepthook(UserError, UserError("sinks is 3"), None)
    assert capsys.readouterr().err == "error: sinks is 3\n"
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "ValueError: another\n"
