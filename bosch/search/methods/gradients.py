"""Searches by gradients of the heads' gates: a tenth of the published evaluations at most."""

from __future__ import annotations

from bosch.search.methods import ANCHORS, Method, register
from bosch.search.settings import SearchSettings, front_budget, plus_budget


def _plus(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    return ANCHORS + plus_budget(settings, num_layers)


register("bosch_plus", Method(
    "BOSCH+", "search", "bosch.search.gradient_search:bosch_plus",
    "elimination and swaps by gradients, a tenth of the published evaluations",
    frozenset({"budget_per_layer"}), _plus, gradients=True,
))  # fmt: skip
register("front", Method(
    "Front", "search", "bosch.search.gradient_search:front",
    "masks of several windows for every budget from one search by gradients",
    frozenset({"budget_per_layer"}),
    lambda settings, layers, _: ANCHORS + front_budget(settings, layers), gradients=True,
    several_windows=True, finds_front=True,
))  # fmt: skip
