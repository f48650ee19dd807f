"""Stage 3: joint choice of heads among layers of equal ratio (BOSCH §2.2.3, Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bosch.heads import HeadMask
from bosch.loss import Loss
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.method.subproblem import optimise_layers


def max_layers_per_group(num_heads: int, max_variables: int) -> int:
    """Layers that are searched together: the largest power of two within `max_variables`.

    BOSCH B.2 groups at most four layers of 8 KV heads under its limit of 50 variables.
    """
    layers = max(1, max_variables // num_heads)
    return int(1 << (layers.bit_length() - 1))


def ratio_groups(
    quotas: Sequence[int], num_heads: int, max_variables: int
) -> list[tuple[list[int], int]]:
    """Layers of equal quota, most sliding first, as (layers, units of one layer).

    A group of too many variables is split into parts of equal size, or nearly so, of neighbours in
    depth. The deepest part comes first: while it is searched, no layer below it has changed yet.
    Layers with no sliding unit are left out.
    """
    limit = max_layers_per_group(num_heads, max_variables)
    groups = []
    for quota in sorted(set(quotas) - {0}, reverse=True):
        layers = [layer for layer, q in enumerate(quotas) if q == quota]
        parts = -(-len(layers) // limit) if quota < num_heads else 1
        groups += [(part.tolist(), quota) for part in np.array_split(layers, parts)[::-1]]
    return groups


def head_selection(
    ledger: Ledger, settings: SearchSettings, loss: Loss, quotas: Sequence[int]
) -> HeadMask:
    """Choose `quotas[l]` units of each layer, summed over the layers of a group (Algorithm 3).

    Starts from all full. Groups of ratio 0 and 1 are set, not searched.
    """
    heads = ledger.scorer.num_key_value_heads
    mask = HeadMask.all_full(ledger.scorer.num_layers, heads)
    for number, (layers, quota) in enumerate(
        ratio_groups(quotas, heads, settings.max_group_variables)
    ):
        if quota == heads:
            for layer in layers:
                mask = mask.with_layer(layer, np.zeros(heads, dtype=np.bool_))
            continue
        solution = optimise_layers(
            ledger, settings, loss, mask, layers, quota * len(layers),
            "head_selection", f"group {number}",
        )  # fmt: skip
        mask = solution.mask
        if solution.plateau:
            ledger.note(
                f"group {number} ({_named(layers)}): every candidate scored "
                f"{solution.evaluation.score:.4g}; " + _plateau_consequence(settings.break_ties)
            )
    return mask


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _plateau_consequence(break_ties: bool) -> str:
    if break_ties:
        return "its heads were chosen by log-likelihood alone"
    return "the choice of its heads is arbitrary"
