"""Head masks, their budgets and their file; units of heads, and the window convention."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

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
from bosch.heads import HeadMask, HeadMaskFile
from bosch.units import Units
from bosch.window import Window, block_size, window_menu

_MASKS = st.tuples(st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda shape: st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: HeadMask(np.array(rows)))
)


@given(_MASKS)
def test_a_mask_survives_every_conversion(mask: HeadMask) -> None:
    assert HeadMask.from_swa_kv_heads(mask.swa_kv_heads, mask.num_key_value_heads) == mask
    assert HeadMask.from_key(mask.key) == mask
    assert hash(HeadMask(mask.is_full.astype(int))) == hash(mask)


@given(_MASKS, st.integers(1, 15), st.integers(0, 9))
def test_a_mask_of_several_windows_survives_every_conversion(
    shape: HeadMask, most: int, seed: int
) -> None:
    choices = np.random.default_rng(seed).integers(0, most + 1, shape.is_full.shape)
    mask = HeadMask.of_choices(choices)
    assert np.array_equal(mask.is_full, choices == 0) and mask.num_windows == choices.max()
    assert HeadMask.from_key(mask.key) == mask
    assert (mask == HeadMask(mask.is_full)) == (choices.max() < 2)
    windows = [Window(3 * size) for size in range(1, most + 1)]
    file = HeadMaskFile.of(
        mask, windows, model="m", method="given", swa_ratio=mask.swa_ratio, score=0.9, seed=seed
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head_mask.json"
        file.save(path)
        assert HeadMaskFile.load(path) == file
        assert json.loads(path.read_text())["format"] == (2 if most > 1 else 1)
    rows = mask.heads_per_layer(windows)
    shares = [(choices == choice).mean() for choice in range(1, most + 1)]
    assert list(window_shares(rows).values()) == pytest.approx(shares)
    sizes = np.array([100, *(window.size - 1 for window in window_menu(windows))])
    assert mask.kv_slots(windows, 100) == sizes[choices].sum()


def test_window_shares_count_windows_that_the_first_layer_lacks() -> None:
    assert window_shares([{None: 3}, {None: 1, Window(4): 2}]) == {Window(4): 1 / 3}


def test_changing_a_layer_keeps_the_windows_of_the_others() -> None:
    mask = HeadMask.of_choices([[0, 2], [3, 1]])
    assert mask.with_layer(0, [False, True]) == HeadMask.of_choices([[1, 0], [3, 1]])


def test_polarity_true_is_full() -> None:
    mask = HeadMask.from_swa_kv_heads([[1], []], 3)
    assert mask.is_full.tolist() == [[True, False, True], [True, True, True]]
    assert mask.full_kv_heads_per_layer == [2, 3]
    assert HeadMask.all_full(2, 3).swa_ratio == 0.0
    assert HeadMask.all_sliding(2, 3).swa_ratio == 1.0


def test_a_mask_is_immutable_and_independent_of_its_source() -> None:
    bits = np.ones((2, 2), dtype=bool)
    mask = HeadMask(bits)
    bits[0, 0] = False
    assert mask.is_full.all()
    with pytest.raises(ValueError, match="read-only"):
        mask.is_full[0, 0] = False


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


def test_a_file_accepts_numpys_numbers(tmp_path: Path) -> None:
    ratio, score = np.float32([0.5, 0.75])
    mask = HeadMask.from_swa_kv_heads([[0], [1]], 2)
    numbers = {"swa_ratio": ratio, "score": score, "seed": np.int64(3)}
    HeadMaskFile.of(mask, Window(8), model="m", method="rand", **numbers).save(
        tmp_path / "mask.json"
    )
    file = HeadMaskFile.load(tmp_path / "mask.json")
    assert (file.swa_ratio, file.score, file.seed) == (0.5, 0.75, 3)


def test_a_unit_holds_heads_of_similar_value() -> None:
    values = np.array([[3.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    units = Units.by_value(values, 2)
    assert units.heads.tolist() == [[[1, 3], [2, 0]], [[0, 1], [2, 3]]]
    mask = units.head_mask(HeadMask(np.array([[False, True], [True, False]])))
    assert mask.swa_kv_heads == [[1, 3], [2, 3]]
    assert units.gather(values)[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_units_of_one_head_are_the_heads() -> None:
    mask = HeadMask(np.array([[True, False, False], [False, True, True]]))
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
    left, right = window.flash
    assert (left + 1, right) == (1024, 0)
    assert window.past + 1 == window.size == 1024
    assert window.max_keys == 1028
    assert (str(window), str(Window(512))) == ("1,024 with 4 sinks", "512")
    assert [Window(4, 2).held(tokens) for tokens in (2, 3, 4, 9)] == [2, 3, 5, 5]
    assert [block_size(size) for size in (1, 16, 17, 128, 129)] == [16, 16, 17, 128, 128]
    assert Window(2**31 - 2, 1).max_keys == 2**31 - 1
