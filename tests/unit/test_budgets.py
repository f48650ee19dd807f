"""Budgets of a search: how they are written, what a mask costs, refusals, and which point fits.

Method given: a head mask from a file, checked against the model, the ratio and the window.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bosch.errors import UserError
from bosch.mask_files import Front, FrontPoint, HeadMaskFile, HeldOut
from bosch.masks import HeadMask
from bosch.model.families import DecoderLayers
from bosch.score.objective import Objective
from bosch.search.runs import find_mask
from bosch.search.settings import SearchSettings
from bosch.window import Window
from pipeline.cli import main
from pipeline.commands.plan import plan_lines
from pipeline.recipe.load import load_recipe
from pipeline.run.graph import resolve
from pipeline.run.store import Store
from stages.search import run as search
from stages.search.budget import Budget, RequestCache, sliding_ratio
from stages.search.charts import front_picture
from stages.search.points import chosen_point, point_slots
from stages.search.stage import SearchConfig
from tests.hybrid_case import small_config
from tests.pipeline_case import Case
from tests.search_case import WINDOW, config_of, evaluator_of, searchable, write_inputs

_KINDS = DecoderLayers(4, (0, 1, 2, 3), heads=4, head_dim=8)


@pytest.mark.parametrize(
    ("values", "name", "amount", "tokens"),
    [
        ({"kv_cache": "0.25 @ 32k"}, "kv_cache", 0.25, 32_768),
        ({"kv_cache": " 1e-1@100 "}, "kv_cache", 0.1, 100),
        ({"bytes": "2GiB @ 32k"}, "bytes", 2 * 2**30, 32_768),
        ({"bytes": "1.5MB @ 1,000"}, "bytes", 1_500_000, 1000),
    ],
)
def test_a_budget_survives_writing_and_reading(
    values: dict[str, Any], name: str, amount: float, tokens: int
) -> None:
    budget = Budget(**values)
    assert (budget.name, budget.amount, budget.tokens) == (name, amount, tokens)
    assert Budget.model_validate(budget.model_dump(mode="json")) == budget


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kv_cache": "0.25 @ 32k", "bytes": "2GiB @ 32k"},
        {"kv_cache": 0.25},
        {"kv_cache": "1.5 @ 32k"},
        {"kv_cache": "0 @ 32k"},
        {"kv_cache": "0.25 @ "},
        {"kv_cache": "0.25 @ 0"},
        {"kv_cache": "0.25 @ 1000000000000001"},
        {"bytes": "2GiB"},
        {"bytes": "much @ 32k"},
    ],
    ids=str,
)
def test_invalid_budgets_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Budget(**values)


@given(
    share=st.floats(0.01, 1),
    window=st.integers(1, 120),
    sinks=st.integers(0, 3),
    granularity=st.sampled_from([1, 2, 4]),
)
def test_the_fewest_sliding_heads_fit_a_budget(
    share: float, window: int, sinks: int, granularity: int
) -> None:
    """Compared with trying every number of sliding heads."""
    cache = RequestCache(Budget(kv_cache=f"{share} @ 100"), _KINDS, "float32", 100)
    own = Window(window, sinks)
    held = {n: cache.bytes_of(cache.with_sliding(n, own)) for n in range(0, 17, granularity)}
    assert held[0] == cache.original
    fitting = [n for n, size in held.items() if size <= share * cache.original]
    fewest = cache.fewest_sliding(own, cache.allowed_bytes, granularity)
    assert fewest == (fitting[0] if fitting else None)


def test_a_share_that_fits_exactly_is_allowed() -> None:
    """Although in floats 0.57 * 100 is 56.99999999999999."""
    for hundredths, context in product(range(1, 101), (99, 100)):
        cache = RequestCache(
            Budget(kv_cache=f"{hundredths / 100} @ {context}"), _KINDS, "float32", context
        )
        assert cache.allowed_bytes == hundredths * cache.original // 100, hundredths


@pytest.mark.parametrize("tokens", [7, 97, 997, 99_991])
def test_the_share_named_in_a_refusal_is_enough(tokens: int) -> None:
    window = Window(3)
    with pytest.raises(UserError, match=r"choose more, or a smaller window") as refused:
        sliding_ratio(
            RequestCache(Budget(bytes=f"1B @ {tokens}"), _KINDS, "float32", tokens), window, 1
        )
    share = re.search(r"\((\S+) of the original's\)", str(refused.value))
    assert share is not None
    cache = RequestCache(Budget(kv_cache=f"{share[1]} @ {tokens}"), _KINDS, "float32", tokens)
    assert sliding_ratio(cache, window, 1) == 1


def _search(case: Case, *overrides: str) -> SearchConfig:
    return load_recipe(case.file, overrides, env={}).recipe[SearchConfig]


def test_an_override_replaces_the_files_other_form_of_a_budget(case: Case) -> None:
    """The file has swa_ratio and window_size."""
    search = _search(case, "search.budget.kv_cache=0.5 @ 512", "search.window_size=16")
    assert search.swa_ratio is None and search.budget == Budget(kv_cache="0.5 @ 512")
    case.content["search"] = {"budget": {"kv_cache": "0.5 @ 512"}, "windows": [8, 16]}
    case.save()
    case.content["search"]["method"] = "given"
    search = _search(case, "search.budget.bytes=1MiB @ 512", "search.window_size=16")
    assert search.budget == Budget(bytes="1MiB @ 512") and search.menu == (Window(16),)
    assert _search(case, "search.swa_ratio=0.5", "search.window_size=16").budget is None
    fault = case.fault("search.swa_ratio=0.5", "search.budget.kv_cache=0.5 @ 512")
    assert fault == "search: names swa_ratio and budget, which exclude each other; keep one"


def test_a_budget_in_bytes_gives_the_fewest_sliding_heads(case: Case) -> None:
    """16 heads of 32 bytes a token: 8 sliding ones hold 8 * 31 + 8 * 512 slots, .53 of all."""
    kinds = load_recipe(case.file, env={}).info.kinds  # type: ignore[union-attr]
    for share, sliding in ((0.54, 8), (0.53, 9), (1, 0)):
        search = _search(case, f"search.budget.kv_cache={share} @ 512")
        assert search.ratio_for(kinds, "bfloat16") * 16 == sliding
        assert search.settings(0, sliding / 16).swa_ratio == sliding / 16
    search = _search(case, "search.budget.kv_cache=0.53 @ 512", "search.head_granularity=4")
    assert search.ratio_for(kinds, "bfloat16") * 16 == 12
    rows = search.kv_heads(kinds, "bfloat16")
    assert rows == [{None: 1, Window(32): 3}] * 4


def test_a_given_mask_must_fit_the_budgets_bytes(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 slots of a window of 8 are cheaper than 4 full heads."""
    mask = HeadMask(((0, 32, 8, 8),) * 4)
    HeadMaskFile(mask, "m", "elsewhere").save(case.folder / "mask.json")
    case.content["search"] = {
        "method": "given", "mask": str(case.folder / "mask.json"), "windows": [8, 32],
        "budget": {"kv_cache": "0.3 @ 512"},
    }  # fmt: skip
    case.save()
    assert main(["validate", str(case.file)]) == 0
    assert main(["validate", str(case.file), "search.budget.kv_cache=0.27 @ 512"]) == 2
    fault = capsys.readouterr().err
    assert "search.budget.kv_cache: allows " in fault and "(27.2%)" in fault
    assert main(["validate", str(case.file), "search.windows=[8,16]"]) == 2
    assert "set windows: [8, 32] and sinks: 0" in capsys.readouterr().err


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


def test_a_given_mask_has_its_own_ratio(tmp_path: Path) -> None:
    mask = HeadMask(((11, 0, 0, 0), (11, 11, 11, 0), (0, 0, 0, 0)))
    path = tmp_path / "mask.json"
    HeadMaskFile(mask, "m", "given").save(path)
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


_CONTEXT = 100
# Points from the smallest: full heads of a layer, score, held-out score and its limits.
_POINTS = [(0, 0.1, 0.2, 0.1), (1, 0.8, 0.8, 0.7), (2, 0.8, 0.9, 0.8567), (4, 1.0, 1.0, 0.95)]


def _front(points: list[tuple[int, float, float, float]] = _POINTS) -> Front:
    made = []
    for full, score, held_out, low in points:
        mask = HeadMask(((0,) * full + (8,) * (4 - full),) * 4)
        made.append(_point(mask, score, HeldOut(held_out, low, 1.0)))
    return Front(_CONTEXT, tuple(made))


def _point(mask: HeadMask, score: float, held_out: HeldOut | None = None) -> FrontPoint:
    slots = mask.kv_slots(_CONTEXT)
    return FrontPoint(mask, slots, slots, score, held_out, 0.0)


def _chosen(front: Front, budget: dict[str, str] | float) -> int:
    field = "budget" if isinstance(budget, dict) else "swa_ratio"
    section = SearchConfig(method="front", windows=[8, 32], **{field: budget})
    return chosen_point(front, section, section.request_cache(_KINDS, "float32", _CONTEXT))


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        # One full head of four and three with 7 tokens: .3025 of the original's slots.
        ({"kv_cache": "0.31 @ 100"}, 1),
        ({"kv_cache": "0.30 @ 100"}, 0),
        # Equal scores: the larger one.
        ({"kv_cache": "0.9 @ 100"}, 2),
        ({"kv_cache": "1 @ 100"}, 3),
        ({"bytes": f"{64 * 4 * (100 + 21)} @ 100"}, 1),
        ({"bytes": f"{64 * 4 * (100 + 21) - 1} @ 100"}, 0),
        (0.75, 1),
        (0.76, 0),
        (0, 3),
    ],
    ids=str,
)
def test_a_budget_selects_a_point(budget: dict[str, str] | float, chosen: int) -> None:
    assert _chosen(_front(), budget) == chosen


def test_a_ratio_of_sliding_heads_is_met_despite_rounding() -> None:
    """One of ten: 1 - 0.9 is 0.09999999999999998."""
    masks = [HeadMask(((0,) * full + (32,) * (10 - full),)) for full in (0, 9, 10)]
    points = map(_point, masks, (0.1, 0.9, 1.0))
    assert _chosen(Front(_CONTEXT, tuple(points)), 0.1) == 1


def test_a_budget_that_no_point_meets_is_refused() -> None:
    with pytest.raises(UserError, match=r"search\.budget\.kv_cache: the smallest point .*7\.0%"):
        _chosen(_front(), {"kv_cache": "0.05 @ 100"})


def test_points_are_between_the_smallest_window_and_the_original() -> None:
    section = SearchConfig(method="front", swa_ratio=0.5, windows=[8, 32])
    cache = RequestCache(None, _KINDS, "float32", _CONTEXT)
    slots = point_slots(section, cache)
    assert len(slots) == 8 and slots[0] > 16 * 7 and slots[-1] < 16 * 100
    assert np.ptp(np.diff(np.log(slots))) < 0.05
    named = SearchConfig(method="front", swa_ratio=0.5, windows=[8, 32], points=[0.1, 0.25, 0.57])
    assert point_slots(named, cache) == (160, 400, 912)


def test_the_picture_and_the_table_mark_the_chosen_point() -> None:
    chart = front_picture(_front(), chosen=1).chart
    text = json.dumps(chart.to_dict(), separators=(",", ":"))
    assert text.count('"series":"chosen"') == text.count('"series":"original"') == 1
    assert [text.count(f'"number":{number}') for number in range(1, 6)] == [1, 1, 1, 1, 0]


@pytest.fixture
def front_case(case: Case) -> Case:
    case.content["search"] = {"method": "front", "swa_ratio": 0.5, "windows": [8, 32]}
    case.save()
    return case


def _documents(front_case: Case, *overrides: str) -> dict[str, Any]:
    loaded = load_recipe(front_case.file, overrides, env={})
    nodes = resolve(loaded, Store(loaded.output_root).hasher())
    return {node.name: node.document for node in nodes}


def test_another_point_needs_no_new_search(front_case: Case) -> None:
    first, other = _documents(front_case), _documents(front_case, "materialize.point=2")
    assert other["search"] == first["search"]
    assert other["materialize"] != first["materialize"]
    # A method without a front ignores it.
    one, same = (
        _documents(front_case, "search.method=intr", *more)
        for more in ([], ["materialize.point=2"])
    )
    assert one["materialize"] == same["materialize"]


def test_the_plan_counts_the_evaluations_of_a_front(front_case: Case) -> None:
    """Two anchors and the passes of a front, each over three of the four examples."""
    lines = "\n".join(
        plan_lines(load_recipe(front_case.file, ["search.budget.kv_cache=0.5 @ 256"]))
    )
    assert "at most 62 evaluations of 768 tokens" in lines


def test_the_stage_writes_a_front_with_costs_and_no_mask(tmp_path: Path) -> None:
    """tests/e2e/test_materialize_stage.py makes a model of it."""
    base, prepared = write_inputs(tmp_path, examples=8)
    section = SearchConfig(method="front", swa_ratio=0.5, windows=[4, 8], budget_per_layer=40)
    config = replace(config_of(base, section, eval_batch_size=3), seed=9)
    search.run(config, {"prepare": prepared}, tmp_path)
    assert not (tmp_path / "head_mask.json").exists() and (tmp_path / "front.svg").exists()
    front, model = Front.load(tmp_path / "front.json"), small_config("qwen3")
    for point in front.points:
        assert len(point.mask.windows) == model.num_hidden_layers
        assert point.bytes == point.mask.kv_slots(front.context) * 2 * model.head_dim * 4
        assert point.held_out is not None


def _mask_saved(path: Path, mask: HeadMask, window: int = WINDOW) -> str:
    HeadMaskFile(HeadMask.of(mask.is_full, Window(window)), "m", "elsewhere").save(path)
    return str(path)


def _mask(shape: tuple[int, int], sliding: int, seed: int = 0) -> HeadMask:
    bits = np.ones(shape[0] * shape[1], dtype=bool)
    bits[np.random.default_rng(seed).permutation(bits.size)[:sliding]] = False
    return HeadMask.of(bits.reshape(shape), Window(WINDOW))


@pytest.fixture(scope="module")
def objective() -> Objective:
    model, calibration = searchable()
    return Objective(model, calibration, Window(WINDOW), batch_size=4)


def _find(objective: Any, **settings: Any) -> Any:
    return find_mask("given", evaluator_of(objective), SearchSettings(**settings))


def test_the_mask_in_the_file_is_scored(tmp_path: Path, objective: Objective) -> None:
    shape = objective.num_layers, objective.num_key_value_heads
    mask = _mask(shape, 5)
    path = _mask_saved(tmp_path / "mask.json", mask)
    result = _find(objective, swa_ratio=mask.swa_ratio, mask=path)
    assert result.mask == mask
    assert result.evaluation.score == objective.evaluate(mask).score


def test_a_given_mask_must_be_named(objective: Objective) -> None:
    with pytest.raises(UserError, match=r"search\.mask: method given takes .* from a file"):
        _find(objective, swa_ratio=0.5)


def test_no_head_of_a_given_mask_gets_another_window(tmp_path: Path) -> None:
    """Even if the anchor is on budget and scores more."""
    model, calibration = searchable()
    menu = Window(WINDOW), Window(3)
    objective = Objective(model, calibration, menu, batch_size=4)
    heads = np.arange(12).reshape(objective.shape)
    masks = [HeadMask(np.where(heads == one, WINDOW, 3).tolist()) for one in range(12)]
    mask = min(masks, key=lambda mask: objective.evaluate(mask).rank)
    narrowest = HeadMask.all_sliding(*objective.shape, Window(3))
    assert objective.evaluate(mask).rank < objective.evaluate(narrowest).rank
    path = str(tmp_path / "mask.json")
    HeadMaskFile(mask, "m", "elsewhere").save(path)
    assert _find(objective, swa_ratio=1, mask=path).mask == mask


@pytest.mark.parametrize(
    ("layers", "sliding", "window", "granularity", "sentence"),
    [
        (1, 6, WINDOW, 1, "KV heads, the model has"),
        (0, 4, WINDOW, 1, r"search\.swa_ratio: .* set it to"),
        (0, 6, WINDOW + 1, 1, r"search\.window_size: the window is"),
        (0, 6, WINDOW, 2, r"search\.head_granularity: layer 0 of .* has 3 full KV heads, no mul"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(
    tmp_path: Path,
    objective: Objective,
    layers: int,
    sliding: int,
    window: int,
    granularity: int,
    sentence: str,
) -> None:
    shape = objective.num_layers, objective.num_key_value_heads
    path = _mask_saved(
        tmp_path / "mask.json", _mask((shape[0] + layers, shape[1]), sliding), window
    )
    with pytest.raises(UserError, match=sentence):
        _find(objective, swa_ratio=0.5, mask=path, head_granularity=granularity)


def _keys(case: Case) -> dict[str, str | None]:
    loaded = load_recipe(case.file, env={})
    hasher = Store(loaded.output_root).hasher()
    return {node.name: node.key for node in resolve(loaded, hasher)}


def test_the_recipe_names_the_file_and_its_content_is_in_the_key(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.content["search"] |= {"method": "given", "mask": str(tmp_path / "mask.json")}
    case.save()
    with pytest.raises(UserError, match=r"search\.mask: there is no file"):
        load_recipe(case.file, env={})
    (tmp_path / "mask.json").write_text("{}")
    _mask_saved(tmp_path / "mask.json", _mask((4, 4), 8))
    first = _keys(case)
    _mask_saved(tmp_path / "mask.json", _mask((4, 4), 8, seed=1))
    second = _keys(case)
    assert first["prepare"] == second["prepare"] and first["search"] != second["search"]
    case.content["search"]["mask"] = str((tmp_path / "mask.json").rename(tmp_path / "other.json"))
    case.save()
    assert _keys(case) == second


def test_validate_reads_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    case.content["search"] |= {"method": "given", "mask": str(tmp_path / "mask.json")}
    case.save()
    for window, status in ((32, 0), (31, 2)):
        _mask_saved(tmp_path / "mask.json", _mask((4, 4), 8), window)
        assert main(["validate", str(case.file)]) == status
    assert "search.window_size: the window is" in capsys.readouterr().err
