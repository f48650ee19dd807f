"""The published search and its ablations: they spend kappa evaluations per layer."""

from __future__ import annotations

import math

from bosch.budget import swa_budget
from bosch.search.groups import layer_groups, max_layers_per_group
from bosch.search.methods import ANCHORS, Method, register
from bosch.search.settings import SearchSettings

_SOLVER = frozenset({"solver", "budget_per_layer", "alpha", "gamma", "strict", "seed"})
_GROUPED = _SOLVER | {"max_group_variables"}


def _sub_problem(settings: SearchSettings, layers: int, units: int, quota: int) -> int:
    """kappa evaluations per layer, or one per candidate on budget if these are fewer (B.2)."""
    return min(settings.budget_per_layer * layers, math.comb(units, quota))


def _layer_importance(
    settings: SearchSettings, num_layers: int, num_units: int, per_group: int
) -> tuple[int, list[int]]:
    """Evaluations of Algorithm 1 and the sliding units of each group."""
    groups = layer_groups(num_layers, per_group)
    quotas = [swa_budget(len(group) * num_units, settings.swa_ratio) for group in groups]
    return sum(
        _sub_problem(settings, len(group), len(group) * num_units, quota)
        for group, quota in zip(groups, quotas, strict=True)
    ), quotas


def _bosch(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    # The groups of Algorithm 3 are not known beforehand: kappa for each layer, as published. If
    # there is nothing to search, the final mask uses one of these.
    evaluations, _ = _layer_importance(settings, num_layers, num_units, 1)
    return ANCHORS + evaluations + settings.budget_per_layer * num_layers


def _b_multi(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    per_group = max_layers_per_group(num_units, settings.max_group_variables)
    return _layer_importance_mask(settings, num_layers, num_units, per_group)


def _layer_importance_mask(
    settings: SearchSettings, num_layers: int, num_units: int, per_group: int = 1
) -> int:
    evaluations, quotas = _layer_importance(settings, num_layers, num_units, per_group)
    # To restore one surplus unit, every sliding unit of one layer is tried.
    surplus = sum(quotas) - swa_budget(num_layers * num_units, settings.swa_ratio)
    return ANCHORS + evaluations + surplus * min(num_units, max(quotas))


def _b_layer(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    budget = swa_budget(num_layers * num_units, settings.swa_ratio)
    quota = -(-budget // num_units)
    surplus = quota * num_units - budget
    # The layer to become partly full is chosen among the sliding ones, then its units in turn.
    repair = quota + sum(num_units - i for i in range(surplus)) if surplus else 0
    return ANCHORS + _sub_problem(settings, num_layers, num_layers, quota) + repair


register("bosch", Method(
    "BOSCH", "search", "bosch.search.bosch:bosch", "the published search, Algorithms 1 to 3",
    _GROUPED | {"buckets"}, _bosch,
))  # fmt: skip
register("b_single", Method(
    "B-single", "ablation", "bosch.search.ablations:b_single",
    "Algorithm 1's own mask, layer by layer", _SOLVER, _layer_importance_mask,
))  # fmt: skip
register("b_multi", Method(
    "B-multi", "ablation", "bosch.search.ablations:b_multi",
    "Algorithm 1's own mask, by groups of layers", _GROUPED, _b_multi,
))  # fmt: skip
register("b_layer", Method(
    "B-layer", "ablation", "bosch.search.ablations:b_layer",
    "Algorithm 1's own mask, by whole layers", _SOLVER, _b_layer,
))  # fmt: skip
