"""Hybrid attention on the CPU stays within its share of the cost of all-full attention.

pytest tests/benchmarks/test_attention_speed.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.benchmarks import attention_speed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with attention_speed.one_thread():
        yield


def test_forward_and_both_modes() -> None:
    ratios = attention_speed.forward_ratios()
    assert ratios["deploy"] <= 0.40
    assert ratios["search"] <= 1.10 * ratios["deploy"]


def test_a_third_group_of_heads() -> None:
    assert attention_speed.groups_ratio() <= 1.1


def test_forward_and_backward() -> None:
    assert attention_speed.training_ratio() <= 0.45


def test_sliding_heads_cost_linear_time() -> None:
    assert attention_speed.sliding_exponent() <= 1.1


def test_decoding_a_token() -> None:
    ratio, held, formula = attention_speed.decode_ratio()
    assert held == formula
    assert ratio <= 0.40


def test_a_chunk_after_a_past_makes_no_masks() -> None:
    ratio, chunk, masked = attention_speed.chunk_ratios()
    assert ratio <= 0.95
    assert chunk <= masked / 3
