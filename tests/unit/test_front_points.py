"""Method front in a recipe: what its key holds, and which point a budget selects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bosch.errors import UserError
from bosch.mask_files import Front, FrontPoint, HeldOut
from bosch.masks import HeadMask
from bosch.model.families import DecoderLayers
from pipeline.commands.plan import plan_lines
from pipeline.recipe.load import load_recipe
from pipeline.run.graph import resolve
from pipeline.run.store import Store
from stages.search import run as search
from stages.search.budget import RequestCache
from stages.search.charts import front_picture
from stages.search.points import chosen_point, point_slots
from stages.search.stage import SearchConfig
from tests.hybrid_case import small_config
from tests.pipeline_case import Case
from tests.search_case import config_of, write_inputs

_KINDS = DecoderLayers(4, (0, 1, 2, 3), heads=4, head_dim=8)
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
def case(case: Case) -> Case:
    case.content["search"] = {"method": "front", "swa_ratio": 0.5, "windows": [8, 32]}
    case.save()
    return case


def _documents(case: Case, *overrides: str) -> dict[str, Any]:
    loaded = load_recipe(case.file, overrides, env={})
    nodes = resolve(loaded, Store(loaded.output_root).hasher())
    return {node.name: node.document for node in nodes}


def test_another_point_needs_no_new_search(case: Case) -> None:
    first, other = _documents(case), _documents(case, "materialize.point=2")
    assert other["search"] == first["search"]
    assert other["materialize"] != first["materialize"]
    # A method without a front ignores it.
    one, same = (
        _documents(case, "search.method=intr", *more) for more in ([], ["materialize.point=2"])
    )
    assert one["materialize"] == same["materialize"]


def test_the_plan_counts_the_evaluations_of_a_front(case: Case) -> None:
    """Two anchors and the passes of a front, each over three of the four examples."""
    lines = "\n".join(plan_lines(load_recipe(case.file, ["search.budget.kv_cache=0.5 @ 256"])))
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
