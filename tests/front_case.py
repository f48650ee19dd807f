"""Random fronts of nested head masks, so that tests need no search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bosch.front import Front, FrontPoint
from bosch.heads import HeadMask
from bosch.window import Window

CONTEXT = 64


def nested_front(
    layers: int,
    heads: int,
    menu: Sequence[Window],
    *,
    points: int = 4,
    context: int = CONTEXT,
    chosen: int | None = 1,
    seed: int = 0,
) -> Front:
    """A front of `points` masks, from all heads at the narrowest window halfway to all heads full.

    From one mask to the next, random heads get the next wider window, or after the widest full
    attention. Each layer has a random order of heads in which none sees more than the one before.
    """
    generator = np.random.default_rng(seed)
    narrowest = len(menu)
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
        mask = HeadMask.of_choices(np.take_along_axis(choices, orders, axis=1))
        score = (1 + len(front_points)) / points
        front_points.append(FrontPoint.of(mask, menu, context, score=score, log_likelihood=-1.0))
    front = Front.of(front_points, menu, context, model="m", seed=seed)
    assert len(front.points) == points
    return replace(front, chosen=chosen)
