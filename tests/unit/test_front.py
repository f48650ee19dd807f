"""front.json: what it holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from bosch.mask_files import Front, FrontPoint, HeldOut
from bosch.masks import HeadMask

CONTEXT = 100
MASKS = [HeadMask(rows, 2) for rows in (((4, 4), (4, 4)), ((16, 4), (4, 0)), ((0, 4), (16, 0)))]


def _front() -> Front:
    slots = [20, 5 + 17 + 5 + 100, 222]
    return Front(CONTEXT, (
        FrontPoint(MASKS[0], slots[0], 200, 0.5, HeldOut(0.5, 0.25, 0.75), 3.5),
        FrontPoint(MASKS[1], slots[1], 1270, 1.0, None, 0.0),
        FrontPoint(MASKS[2], slots[2], None, 0.0, HeldOut(0.0, 0.0, 0.0), 0.0),
    ))  # fmt: skip


def test_a_file_survives_writing_and_reading(tmp_path: Path) -> None:
    front = _front()
    front.save(tmp_path / "front.json")
    assert Front.load(tmp_path / "front.json") == front
    content = json.loads((tmp_path / "front.json").read_text())
    assert content.keys() == {"format", "context", "sinks", "points"} and content["sinks"] == 2
    assert content["points"][0] == {
        "windows": [[4, 4], [4, 4]], "kv_slots": 20, "bytes": 200, "score": 0.5,
        "held_out": {"score": 0.5, "low": 0.25, "high": 0.75}, "passes": 3.5,
    }  # fmt: skip


def _with(**values: Any) -> Any:
    return lambda content: content.update(values)


def _in_point(number: int = 0, **values: Any) -> Any:
    return lambda content: content["points"][number].update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_with(format=2), "format is 2, this version reads format 1"),
        (lambda content: content.pop("context"), "the field context is missing"),
        (_with(context="8k"), "context has an unexpected value '8k'"),
        (_with(sinks=True), "sinks has an unexpected value True"),
        (_with(points=[]), "at least one point"),
        (_with(points=[1]), "expected a JSON object"),
        (_in_point(score=None), "score has an unexpected value None"),
        (_in_point(held_out={"score": 0.5}), "the field low is missing"),
        (_in_point(windows=[[4.0, 4], [4, 4]]), "windows must hold"),
        (_in_point(windows=[[4], [4, 4]]), "windows must hold"),
        (_in_point(kv_slots=21), "points[0]: kv_slots is not that of its windows"),
        (lambda content: content["points"].reverse(), "in order of kv_slots"),
        (lambda content: content["points"].insert(0, content["points"][0]), "in order of kv_slots"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    path = tmp_path / "front.json"
    _front().save(path)
    content = json.loads(path.read_text())
    change(content)
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
