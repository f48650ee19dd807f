"""front.json: what it holds, what is refused, and the order of heads that its points share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from bosch.front import Front, FrontPoint
from bosch.heads import HeadMask
from bosch.window import Window

MENU = [Window(16, 2), Window(4, 2)]
CONTEXT = 100


def _point(choices: list[list[int]], **values: Any) -> FrontPoint:
    values = {"score": 0.5, "log_likelihood": -1.0, **values}
    return FrontPoint.of(HeadMask.of_choices(choices), MENU, CONTEXT, **values)


def _front(*choices: list[list[int]], chosen: int | None = None) -> Front:
    front = Front.of([_point(rows) for rows in choices], MENU, CONTEXT, model="m")
    return replace(front, chosen=chosen)


CHAIN = ([[2, 2], [2, 2]], [[1, 2], [2, 0]], [[0, 2], [1, 0]], [[0, 1], [1, 0]])


def test_a_file_survives_writing_and_reading(tmp_path: Path) -> None:
    points = [
        _point(CHAIN[0], held_out=(0.5, 0.25, 0.75), passes=3.5),
        _point(CHAIN[1], score=1.0, held_out=(1.0, 1.0, 1.0)),
        _point(CHAIN[2], score=0.0, held_out=(0.0, 0.0, 0.0)),
    ]
    same_slots = _point([[2, 1], [0, 2]])
    front = Front.of([*points[::-1], same_slots], MENU, CONTEXT, model="m", seed=3)
    assert front.points == tuple(points) and front.seed == 3
    front = replace(front, chosen=1).priced(lambda mask: 10 * mask.kv_slots(MENU, CONTEXT))
    front.save(tmp_path / "front.json")
    assert Front.load(tmp_path / "front.json") == front
    content = json.loads((tmp_path / "front.json").read_text())
    assert content["window_sizes"] == [4, 16] and content["sinks"] == 2
    assert content["points"][1]["layout"] == [[16, 4], [4, 0]]
    assert [point["kv_slots"] for point in content["points"]] == [20, 5 + 17 + 5 + 100, 222]
    assert [point["bytes"] for point in content["points"]] == [200, 1270, 2220]
    assert front.windows == tuple(MENU)
    assert front.mask(1) == HeadMask.of_choices(CHAIN[1])


def _without(name: str) -> Any:
    return lambda content: content.pop(name)


def _with(**values: Any) -> Any:
    return lambda content: content.update(values)


def _in_point(number: int = 0, **values: Any) -> Any:
    return lambda content: content["points"][number].update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_with(format=2), "format is 2, this version reads format 1"),
        (_without("context"), "the field context is missing"),
        (_with(context="8k"), "context has an unexpected value '8k'"),
        (_with(context=0), "context is 0, expected at least one token"),
        (_with(num_layers=3), "layout must hold 3 rows of 2 windows"),
        (_with(window_sizes=[16, 4]), "window_sizes must be in ascending order"),
        (_with(window_sizes=["a"]), "window_size must be an integer"),
        (_with(window_sizes=list(range(1, 17))), "has 16 windows, a mask has at most 15"),
        (_with(points=[]), "at least one point"),
        (_with(points=[1]), "points[0]: expected a JSON object"),
        (_with(points=[{}] * 100), "points[0]: "),
        (_with(points=[{}] * 101), "101 points, a front has at most 100"),
        (_with(chosen=4), "chosen is 4, there are 4 points"),
        (_with(chosen=-1), "chosen is -1, there are 4 points"),
        (_with(num_key_value_heads=0), "2 layers of 0 KV heads; that is no model"),
        (_in_point(score=None), "points[0]: score has an unexpected value None"),
        (_in_point(score=float("nan")), "expected a finite number"),
        (_in_point(layout=[[5, 4], [4, 4]]), "points[0]: layout has the window 5"),
        (_in_point(layout=[[4.0, 4], [4, 4]]), "points[0]: layout must hold one list"),
        (_in_point(1, layout=[[-4, 4], [4, 4]]), "points[1]: layout has the window -4"),
        (_in_point(1, layout=[[4], [4, 4]]), "points[1]: layout must hold 2 rows of 2 windows"),
        (_in_point(score=1.5), "points[0]: score is 1.5"),
        (_in_point(passes=-1), "passes -1"),
        (_in_point(bytes=-1), "bytes -1"),
        (_in_point(held_out_low=0.5), "held_out_high are 0.5, None, None, expected shares"),
        (
            _in_point(held_out_low=0.5, held_out_score=0.4, held_out_high=0.6),
            "are 0.5, 0.4, 0.6, expected shares in ascending order",
        ),
        (
            _in_point(held_out_low=0.5, held_out_score=0.6, held_out_high=1.5),
            "are 0.5, 0.6, 1.5, expected shares in ascending order",
        ),
        (_in_point(kv_slots=21), "points[0]: kv_slots is 21, its layout has 20"),
        (_in_point(full_kv_heads=1), "points[0]: full_kv_heads is 1, its layout has 0"),
        (lambda content: content["points"].reverse(), "no more than the"),
        (lambda content: content["points"].insert(0, content["points"][0]), "no more than the 20"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    content = _front(*CHAIN).content
    change(content)
    path = tmp_path / "front.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"front\.json: ") as error:
        Front.load(path)
    assert sentence in str(error.value)


def test_a_missing_or_torn_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"front\.json: there is no such file; search again"):
        Front.load(tmp_path / "front.json")
    (tmp_path / "front.json").write_text('{"format": 1, "points": [')
    with pytest.raises(UserError, match=r"cannot be read as JSON .*; search again"):
        Front.load(tmp_path / "front.json")
    (tmp_path / "front.json").write_text("[]")
    with pytest.raises(UserError, match=r"front\.json: .*expected a JSON object with a front"):
        Front.load(tmp_path / "front.json")
