"""Head masks, fronts, their budgets and their files; units of heads, and the window convention."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch.budget import (
    check_granularity,
    swa_budget,
    window_shares,
)
from bosch.errors import UserError
from bosch.mask_files import Front, FrontPoint, HeadMaskFile, HeldOut
from bosch.masks import HeadMask
from bosch.units import Units
from bosch.window import Window

_MASKS = st.tuples(st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda shape: st.lists(
        st.lists(st.sampled_from((0, 0, 3, 6, 90)), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@given(_MASKS, st.integers(0, 4))
def test_all_figures_follow_from_the_windows(rows: list[list[int]], sinks: int) -> None:
    mask, array = HeadMask(rows, sinks), np.array(rows)  # type: ignore[arg-type]
    assert np.array_equal(mask.is_full, array == 0) and mask.shape == array.shape
    assert mask.num_sliding == (array > 0).sum() and mask.swa_ratio == (array > 0).mean()
    sizes = sorted(set(array.flat) - {0}, reverse=True)
    assert mask.menu == tuple(Window(int(size), sinks) for size in sizes)
    shares = [(array == size).mean() for size in sizes]
    assert list(window_shares(mask.layers).values()) == pytest.approx(shares)
    held = np.array([100 if size == 0 else min(100, size - 1 + sinks) for size in array.flat])
    assert mask.kv_slots(100) == held.sum()
    for order, row in zip(mask.head_order, array, strict=True):
        assert sorted(order) == list(range(len(row)))
        seen = [(-(row[head] or 2**31), head) for head in order]
        assert seen == sorted(seen)


@given(_MASKS, st.integers(0, 4))
def test_masks_are_equal_as_their_windows_and_sinks_are(rows: list[list[int]], sinks: int) -> None:
    mask = HeadMask(rows, sinks)  # type: ignore[arg-type]
    same = HeadMask(tuple(map(tuple, rows)), sinks)
    assert mask == same and hash(mask) == hash(same) and mask.key == same.key
    other = HeadMask(rows, sinks + 1)  # type: ignore[arg-type]
    assert (other == mask) == (other.key == mask.key) == (mask.num_sliding == 0)
    with TemporaryDirectory() as folder:
        file = HeadMaskFile(mask, "m", "given", 0.9, 3)
        file.save(Path(folder) / "head_mask.json")
        assert HeadMaskFile.load(Path(folder) / "head_mask.json") == file


@pytest.mark.parametrize(
    ("windows", "sinks"),
    [([], 0), ([[]], 0), ([[1], [1, 2]], 0), ([[1.0]], 0), ([[True]], 0), ([[-1]], 0), ([[1]], -1),
     ([1], 0), ("1", 0), ([[2**31]], 0)],
)  # fmt: skip
def test_what_is_no_mask_is_refused(windows: Any, sinks: int) -> None:
    with pytest.raises(ValueError, match="window"):
        HeadMask(windows, sinks)


@given(st.integers(1, 50), st.integers(1, 40), st.floats(0, 1))
def test_an_even_mask_meets_the_budget_with_similar_layers(
    layers: int, heads: int, ratio: float
) -> None:
    sliding = swa_budget(layers * heads, ratio)
    mask = HeadMask.evenly(layers, heads, sliding, Window(8, 1))
    full = [row[None] for row in mask.layers]
    assert mask.num_sliding == sliding and max(full) - min(full) <= 1


def test_window_shares_count_windows_that_the_first_layer_lacks() -> None:
    assert window_shares([{None: 3}, {None: 1, Window(4): 2}]) == {Window(4): 1 / 3}


@given(st.integers(1, 2000), st.integers(0, 1000))
def test_budget_is_the_exact_ceiling(units: int, thousandths: int) -> None:
    exact = -(-thousandths * units // 1000)
    assert swa_budget(units, thousandths / 1000) == exact


def test_budget_is_exact_although_floats_are_not() -> None:
    assert 0.07 * 100 > 7
    assert swa_budget(100, 0.07) == 7
    assert swa_budget(3, 1 / 3) == 1 and swa_budget(10, 0.1 + 0.2) == 3
    with pytest.raises(ValueError):
        swa_budget(8, 1.5)


@pytest.mark.parametrize("ratio", [1e-3, 1e-9, 1e-300])
def test_any_ratio_above_zero_gives_a_sliding_unit(ratio: float) -> None:
    assert swa_budget(1, ratio) == swa_budget(384, ratio / 384) == 1
    assert swa_budget(384, 1 - 1e-9) == 384
    assert swa_budget(384, 0.0) == 0


def test_a_unit_holds_heads_of_similar_value() -> None:
    values = np.array([[3.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    units = Units.by_value(values, 2)
    assert units.heads.tolist() == [[[1, 3], [2, 0]], [[0, 1], [2, 3]]]
    mask = units.head_mask(HeadMask(((6, 0), (0, 4)), 2))
    assert mask == HeadMask(((0, 6, 0, 6), (0, 0, 4, 4)), 2)
    assert units.gather(values)[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_units_of_one_head_are_the_heads() -> None:
    mask = HeadMask(((0, 6, 6), (4, 0, 0)))
    assert Units.of_neighbours(2, 3).head_mask(mask) == mask


@given(layers=st.integers(1, 50), heads=st.integers(1, 64), ratio=st.floats(0, 1), g=st.data())
def test_a_refused_ratio_names_accepted_ones(
    layers: int, heads: int, ratio: float, g: st.DataObject
) -> None:
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    granularity = g.draw(st.sampled_from(divisors))
    try:
        check_granularity(layers, heads, ratio, granularity)
    except UserError as error:
        assert swa_budget(layers * heads, ratio) % granularity
        named = str(error).rpartition("choose ")[2].split(" or ")
        assert len(named) == 1 + (swa_budget(layers * heads, ratio) > granularity)
        for text in named:
            check_granularity(layers, heads, float(text), granularity)
    else:
        assert swa_budget(layers * heads, ratio) % granularity == 0


def test_window_counts_the_query_itself() -> None:
    window = Window(1024, 4)
    assert window.past + 1 == window.size == 1024
    assert window.max_keys == 1028
    assert (str(window), str(Window(512))) == ("1,024 with 4 sinks", "512")
    assert [Window(4, 2).held(tokens) for tokens in (2, 3, 4, 9)] == [2, 3, 4, 5]
    assert Window(2**31 - 2, 1).max_keys == 2**31 - 1


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
