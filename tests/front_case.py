"""Random fronts of nested head masks, so that tests need no search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bosch.mask_files import Front, FrontPoint
from bosch.masks import HeadMask
from bosch.window import Window

CONTEXT = 64


def nested_front(
    layers: int,
    heads: int,
    menu: Sequence[Window],
    *,
    points: int = 4,
    context: int = CONTEXT,
    seed: int = 0,
) -> Front:
    """A front of `points` masks, from all heads at the narrowest window halfway to all heads full.

    From one mask to the next, random heads get the next wider window, or after the widest full
    attention. Each layer has a random order of heads in which none sees more than the one before.
    """
    generator = np.random.default_rng(seed)
    sizes, narrowest = np.array([0, *(window.size for window in menu)]), len(menu)
    choices = np.full((layers, heads), narrowest)
    steps = np.linspace(0, layers * heads * narrowest // 2, points).round().astype(int)
    orders = np.array([generator.permutation(heads) for _ in range(layers)])
    front_points, widened = [], 0
    for target in steps:
        while widened < target:
            layer, place = generator.integers(layers), generator.integers(heads)
            row = choices[layer]
            if row[place] > (row[place - 1] if place else 0):
                row[place] -= 1
                widened += 1
        windows = sizes[np.take_along_axis(choices, orders, axis=1)]
        mask = HeadMask(windows.tolist(), menu[0].sinks)
        score = (1 + len(front_points)) / points
        front_points.append(FrontPoint(mask, mask.kv_slots(context), None, score, None, 0.0))
    return Front(context, tuple(front_points))
