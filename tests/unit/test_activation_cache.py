"""Which activations a search keeps, and which make room for others."""

from __future__ import annotations

import torch

from bosch.heads import HeadMask
from bosch.objective.activation_cache import ActivationCache


def test_the_least_recently_used_activations_make_room() -> None:
    """Of two inputs that no late pass used, the one stays that was looked up last."""
    mask, cache = HeadMask.all_full(8, 1), ActivationCache(8, 12)
    for layer in (1, 2, 3):
        cache.begin(mask, 0)
        cache.add(mask, layer, 0, torch.zeros(1))
    assert cache.bytes == 12
    cache.begin(mask, 0)
    assert cache.get(mask, 1, 0) is not None and cache.get(mask, 5, 0) is None
    for _ in range(3):
        cache.begin(mask, 0)
    cache.add(mask, 4, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [3, 1, 4] and cache.bytes == 12


def test_activations_of_the_last_two_passes_stay_unless_those_to_come_need_room() -> None:
    mask, cache = HeadMask.all_full(8, 1), ActivationCache(8, 8)
    cache.begin(mask, 0)
    for layer in (1, 2, 3):
        cache.add(mask, layer, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [1, 2]
    cache.begin(mask, 4)  # passes to come start at layer 4
    assert cache.is_pinned(4) and not cache.is_pinned(1)
    cache.add(mask, 4, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [2, 4]
    cache.add(mask, 4, 1, torch.zeros(2))  # more than there is without dropping what is pinned
    assert [(layer, batch) for layer, _, batch in cache.entries] == [(4, 0)] and cache.bytes == 4
    cache.add(mask, 5, 0, torch.zeros(3))  # more than all that may be kept
    assert cache.bytes == 4 and cache.peak_bytes == 8
