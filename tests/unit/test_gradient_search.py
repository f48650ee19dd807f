"""What searches by gradients share: means of gradients over shares in turn, and moves that win."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from bosch.search.evaluator import SHARES
from bosch.search.gradient_search import Move, Worth


def _worth(shares: list[int]) -> Worth:
    """The n-th gradient says n of every unit; share s costs s + 1."""

    def take(layout: Any, share: int) -> np.ndarray:
        shares.append(share)
        return np.array([float(len(shares))])

    evaluator: Any = SimpleNamespace(
        has_gradients=True, cost_of_gradient=lambda share, shares: share + 1
    )
    return Worth(evaluator, take)


def test_worth_is_the_mean_of_the_gradients_at_a_layout() -> None:
    shares: list[int] = []
    worth, here, there = _worth(shares), np.array([True]), np.array([False])
    assert worth.cost == SHARES and worth.known(here) is None
    assert worth.at(here, 3) == 2.0 and worth.at(here, 2) == worth.known(here) == 2.0
    assert worth.at(there) == 4.0 and worth.with_another(here) == (1 + 2 + 3 + 5) / 4
    for _ in range(SHARES):
        worth.with_another(there)
    assert shares == [*range(SHARES), *range(5)] and worth.taken == len(shares)


def test_fixed_values_take_the_place_of_gradients() -> None:
    shares: list[int] = []
    worth = _worth(shares)
    worth.fixed = np.array([7.0])
    layout = np.array([True])
    assert worth.known(layout) == worth.at(layout, 3) == worth.with_another(layout) == 7.0
    assert shares == []


def test_a_move_promises_its_wins_per_pass() -> None:
    assert Move("new", list).promise == 0.5
    assert Move("won", list, wins=2, passes=1.0).promise == 1.0
    assert Move("lost", list, passes=6.0).promise == 0.125
