"""Accepted and refused values of a recipe's search, in pairs of neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.model.families import DecoderLayers
from bosch.search.settings import SearchSettings
from bosch.window import Window
from pipeline.recipe.load import load_recipe
from stages.search.budget import Budget, RequestCache, sliding_ratio
from stages.search.live import mask_file
from stages.search.stage import SearchConfig
from tests.pipeline_case import Case
from tests.search_case import config_of

FRONT = "search.method=front"
TWO, NODES = {"NPROC_PER_NODE": "2"}, {"NNODES": "2", "MASTER_PORT": "1", "MASTER_ADDR": "one"}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """4 layers of 4 KV heads of 8 numbers, 4 calibration examples of 256 tokens, W = 32."""
    case = Case(tmp_path_factory.mktemp("search") / "case")
    case.content["prepare"]["sequence_length"] = 512
    case.content["train"] |= {"total_tokens": 4096, "batch_tokens": 2048}
    case.save()
    return case


# The refused override, the field and value in the message, the nearest accepted override, and
# overrides for both.
REFUSED: dict[str, tuple[str, ...]] = {
    "no mask": ("search.method=given", "search.mask: method given", "seed=0"),
    "head room below none": ("search.gamma=-0.01", "search.gamma: ", "search.gamma=0"),
    "a penalty that is not strict": (
        "search.solver=nomad_penalty", "search.solver: nomad_penalty", "search.solver=nomad",
    ),
    "a penalty of nothing": ("search.alpha=0", "search.alpha: ", "search.alpha=0.01"),
    "windows of one method": (
        "search.windows=[16,32]", "search.windows: method bosch", "search.windows=[16]",
    ),
    "a window of all": (
        "search.window_size=256", "256 is not shorter than prepare.calibration.length = 256",
        "search.window_size=255",
    ),
    "a window and sinks of all": (
        "search.windows=[16,253]", "search.windows: 253 with 3 sinks", "search.windows=[16,252]",
        FRONT, "search.sinks=3",
    ),
    "sinks beyond what engines count": (f"search.sinks={10**15}", "2^31 in all", "search.sinks=3"),
    "windows beyond what engines count": (
        f"search.windows=[{10**14},{10**15}]", "2^31 in all", "search.windows=[16,32]", FRONT,
    ),
    "points of one mask": (
        "search.method=bosch", "search.points: method bosch", FRONT, "search.points=[0.5]",
    ),
    # A window of 32 holds 31 of 256 tokens.
    "a point below all sliding": (
        "search.points=[0.12,0.5]", "0.12 of the KV cache at 256", "search.points=[0.122,0.99]",
        FRONT,
    ),
    "a point that rounds to all KV slots": (
        "search.points=[0.5,0.9999999]", "1 of the KV cache at 256", "search.points=[0.5,0.99]",
        FRONT,
    ),
    # 7 of 256 tokens are 0.02734375.
    "a point just below all sliding": (
        "search.points=[0.0273]", "choose from 0.027344", "search.points=[0.027344]", FRONT,
        "search.windows=[8,32]",
    ),
    "a point of all": ("search.points=[1]", "search.points: 1 of", "search.points=[0.5]", FRONT),
    "a ratio above the buckets": (
        "search.swa_ratio=0.6", "search.swa_ratio: 0.6 cannot be reached: with search.buckets "
        "[0.0, 0.5] a layer's ratio is at most 0.5", "search.swa_ratio=0.5",
        "search.buckets=[0,0.5]",
    ),
    "a ratio below the buckets": (
        "search.method=bosch", "ratio is at least 0.5", "search.method=rand",
        "search.swa_ratio=0.4", "search.buckets=[0.5,1]",
    ),
    # Fourteen of sixteen heads have to slide.
    "bytes above the buckets": (
        "search.buckets=[0,0.75]", "search.budget: 0.875 cannot be reached",
        "search.buckets=[0,0.875]", "search.budget={kv_cache: 0.25 @ 256}",
    ),
    "bytes below all sliding": (
        "search.budget={kv_cache: 0.12 @ 256}", "a window of 32 hold at 256 tokens",
        "search.budget={kv_cache: 0.1211 @ 256}",
    ),
    "a budget at few tokens": (
        "search.budget={kv_cache: 0.9 @ 31}", "search.window_size: 32 is no cheaper than a full "
        "head at the 31", "search.budget={kv_cache: 0.99 @ 32}",
    ),
    "groups that are no divisor": (
        "search.head_granularity=3", "search.head_granularity: 4 KV", "search.head_granularity=4",
    ),
    "a ratio of half a group": (
        "search.head_granularity=4", "search.swa_ratio: 0.4 means 7 sliding heads of 16",
        "search.head_granularity=1", "search.swa_ratio=0.4",
    ),
    "float32 in flash": (
        "model.dtype=float32", "float16 and bfloat16, model.dtype asks for float32",
        "model.dtype=bfloat16", "runtime.attention=flash",
    ),
    "sinks in flash": (
        "search.sinks=2", "flash has no sinks, search.sinks asks for 2", "search.sinks=0",
        "runtime.attention=flash",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_is_refused_and_its_neighbour_is_accepted(name: str, case: Case) -> None:
    refused, said, taken, *beside = REFUSED[name]
    fault = case.fault(*beside, refused)
    assert said in fault and "\n" not in fault
    load_recipe(case.file, [*beside, taken], env={})


KINDS = DecoderLayers(
    4, (0, 1, 3), heads=4, head_dim=8, windows={2: 20}, own_heads=2, own_head_dim=4
)


@pytest.mark.parametrize(
    ("values", "most", "text"),
    [
        # Three full layers of 4 heads hold 100 tokens of 2 x 8 numbers, one of 2 heads 19 of 2 x 4.
        ({"kv_cache": "0.25 @ 100"}, 1200 * 16 + 38 * 8, "100 tokens"),
        ({"bytes": "8KiB @ 100"}, 8192, "of the original's 76"),
    ],
)
def test_bytes_that_a_budget_allows(values: dict[str, object], most: int, text: str) -> None:
    cache = RequestCache(Budget(**values), KINDS, "float32", 100)
    assert cache.allowed_bytes == most
    assert text in cache.text(cache.original // 2)


def test_the_fewest_sliding_heads_that_fit_a_budget() -> None:
    """A head of W = 11 saves 90 of 100 tokens; twelve heads and the layer's own are 1,219."""
    for share, granularity, sliding in ((1.0, 1, 0), (0.93, 1, 1), (0.925, 1, 2), (0.93, 2, 2)):
        cache = RequestCache(Budget(kv_cache=f"{share} @ 100"), KINDS, "float32", 100)
        assert sliding_ratio(cache, Window(11), granularity) == sliding / 12
    cache = RequestCache(Budget(kv_cache="0.1 @ 100"), KINDS, "float32", 100)
    with pytest.raises(UserError, match=r"all heads with a window of 11 hold at 100 tokens"):
        sliding_ratio(cache, Window(11), 1)


def test_a_given_ratio_replaces_the_sections() -> None:
    section = SearchConfig(swa_ratio=0.5, buckets=[0, 1])
    assert (section.settings(3).seed, section.settings(3).swa_ratio) == (3, 0.5)
    assert section.settings(3, 0.25) == SearchSettings(0.25, buckets=(0, 1), seed=3)


def test_a_given_mask_has_its_own_ratio(tmp_path: Path) -> None:
    mask = HeadMask.from_swa_kv_heads([[0], [0, 1, 2], []], 4)
    path = tmp_path / "mask.json"
    file = HeadMaskFile.of(mask, Window(11), model="m", method="given", swa_ratio=1 / 3)
    file.save(path)
    search = SearchConfig(
        method="given", budget=Budget(kv_cache="0.5 @ 100"), window_size=11, mask=str(path)
    )
    assert search.ratio_for(KINDS, "float32") == pytest.approx(4 / 12)
    assert search.kv_heads(KINDS, "float32") == [
        {None: 3, Window(11): 1}, {None: 1, Window(11): 3}, {None: 4, Window(11): 0},
    ]  # fmt: skip
    for kinds in (DecoderLayers(3, (0, 1, 2), 8, 8), DecoderLayers(4, (0, 1, 2, 3), 4, 8)):
        with pytest.raises(UserError, match="is no mask for"):
            search.kv_heads(kinds, "float32")
    even = SearchConfig(swa_ratio=0.5, window_size=11).kv_heads(KINDS, "float32")
    assert even == [{None: 2, Window(11): 2}] * 3


@pytest.mark.parametrize(
    ("windows", "ratio"), [({"windows": [4, 16]}, 0.75), ({"window_size": 16}, 0.7)]
)
def test_a_mask_of_several_windows_has_its_own_ratio_in_the_file(
    windows: dict[str, Any], ratio: float, tmp_path: Path
) -> None:
    """With one window the file has the requested ratio, which 3 of 4 heads meet."""
    section = SearchConfig(method="given", swa_ratio=0.7, **windows)
    mask = HeadMask.of_choices([[0, 1], [1, 1]])
    assert mask_file(config_of(tmp_path, section), mask, 0.5).swa_ratio == ratio


@pytest.mark.parametrize(
    "overrides",
    [
        ["search.budget.bytes=1MiB @ 1k"],
        [FRONT, "search.windows=[8,16]", "search.budget.kv_cache=0.6 @ 1k"],
        [FRONT, "search.windows=[8,16]", "search.points=[0.25,0.5]"],
    ],
)
def test_a_model_without_full_attention_is_reported_and_not_its_budget(
    tmp_path: Path, overrides: list[str]
) -> None:
    case = Case(tmp_path)
    case.change_config(model_type="mistral", sliding_window=9, layer_types=None)
    fault = case.fault(*overrides)
    assert fault.startswith("model.path: the model has a sliding window of its own (9 tokens)")
    assert "\n" not in fault
