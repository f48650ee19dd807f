"""Units of heads: which heads go together, and what their masks and values mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch.budget import check_granularity, swa_budget
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.units import Units


def test_a_unit_holds_heads_of_similar_value() -> None:
    values = np.array([[3.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    units = Units.by_value(values, 2)
    assert units.heads.tolist() == [[[1, 3], [2, 0]], [[0, 1], [2, 3]]]
    mask = units.head_mask(HeadMask(np.array([[False, True], [True, False]])))
    assert mask.swa_kv_heads == [[1, 3], [2, 3]]
    assert units.of_heads(values)[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_units_of_one_head_are_the_heads() -> None:
    mask = HeadMask(np.array([[True, False, False], [False, True, True]]))
    assert Units.of_neighbours(2, 3).head_mask(mask) == mask


@given(layers=st.integers(1, 50), heads=st.integers(1, 64), ratio=st.floats(0, 1), g=st.data())
def test_a_refused_ratio_names_ratios_that_are_not(
    layers: int, heads: int, ratio: float, g: st.DataObject
) -> None:
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    granularity = g.draw(st.sampled_from(divisors))
    try:
        check_granularity(layers, heads, ratio, granularity)
    except UserError as error:
        assert swa_budget(layers * heads, ratio) % granularity
        named = str(error).rpartition("swa_ratio ")[2].split(" or ")
        assert len(named) == 2
        for text in named:
            check_granularity(layers, heads, float(text), granularity)
    else:
        assert swa_budget(layers * heads, ratio) % granularity == 0


def test_heads_that_units_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="choose a divisor of 8"):
        check_granularity(4, 8, 0.5, 3)
