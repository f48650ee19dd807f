"""BOSCH §2.2.3, Algorithm 3: joint choice of heads among layers of equal ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bosch.heads import HeadMask
from bosch.search.evaluator import Evaluator
from bosch.search.groups import max_layers_per_group, split_evenly
from bosch.search.loss import Loss
from bosch.search.settings import SearchSettings
from bosch.search.subproblem import optimise_layers


def ratio_groups(
    quotas: Sequence[int], num_heads: int, max_variables: int
) -> list[tuple[list[int], int]]:
    """Layers of equal quota, most sliding first, as (layers, units of one layer).

    A group of too many variables is split into subgroups of neighbours in depth, of equal size or
    nearly so. The deepest one comes first: while it is searched, no layer below it has changed.
    Layers with no sliding unit are left out.
    """
    limit = max_layers_per_group(num_heads, max_variables)
    groups = []
    for quota in sorted(set(quotas) - {0}, reverse=True):
        layers = [layer for layer, q in enumerate(quotas) if q == quota]
        subgroups = -(-len(layers) // limit) if quota < num_heads else 1
        groups += [(subgroup, quota) for subgroup in reversed(split_evenly(layers, subgroups))]
    return groups


def head_selection(
    evaluator: Evaluator, settings: SearchSettings, loss: Loss, quotas: Sequence[int]
) -> HeadMask:
    """Choose `quotas[l]` units of each layer, summed over the layers of a group (Algorithm 3).

    `quotas` are M of line 5. Starts from all full. Groups of ratio 0 and 1 are set, not searched.
    """
    num_layers, units = evaluator.shape
    mask = HeadMask.all_full(num_layers, units)  # line 4
    groups = ratio_groups(quotas, units, settings.max_group_variables)  # line 6
    for number, (layers, quota) in enumerate(groups):  # line 7
        if quota == units:
            for layer in layers:
                mask = mask.with_layer(layer, np.zeros(units, dtype=np.bool_))
            continue
        solution = optimise_layers(
            evaluator, settings, loss, mask, layers, quota * len(layers),
            "head_selection", f"group {number}",
        )  # lines 8 to 10  # fmt: skip
        mask = solution.mask
        if solution.plateau:
            evaluator.note(
                f"group {number} ({_named(layers)}): every candidate scored "
                f"{solution.evaluation.score:.4g}; " + _plateau_consequence(settings.break_ties)
            )
    return mask  # line 11


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _plateau_consequence(break_ties: bool) -> str:
    if break_ties:
        return "its heads were chosen by log-likelihood alone"
    return "the choice of its heads is arbitrary"
