"""Searches by gradients of the heads' gates: a tenth of the published evaluations at most."""

from __future__ import annotations

from bosch.search.methods import ANCHORS, Method, register
from bosch.search.settings import SearchSettings, front_budget, plus_budget


def _plus(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    return ANCHORS + plus_budget(settings, num_layers)


def _one_gradient(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    # In forward passes: forward, recomputation, and 2.5 for backward through attention.
    gradient = 5
    return ANCHORS + gradient + 1


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
register("learned_gates", Method(
    "Gates", "search", "bosch.search.gradient_search:learned_gates",
    "gates learned by gradient at an exact ratio (arXiv 2410.10819, 2606.18056)",
    frozenset({"budget_per_layer", "seed"}), _plus, gradients=True,
))  # fmt: skip
register("one_gradient", Method(
    "One gradient", "search", "bosch.search.rivals:one_gradient",
    "ranks heads by one gradient at the original model", frozenset({"strict"}), _one_gradient,
    gradients=True,
))  # fmt: skip
