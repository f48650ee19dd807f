"""Fronts of nested head masks at random, for models that no search has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from bosch.front import Front, FrontPoint
from bosch.heads import HeadMask
from bosch.model.materialize import materialize
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
    """So many masks from the sparsest to one with half of the heads full, each within the next.

    In each step heads at random get a wider window, or all of the context. Each layer's heads have
    a random order, in which none sees more than the one before it.
    """
    generator = np.random.default_rng(seed)
    narrowest = len(menu)
    choices = np.full((layers, heads), narrowest)
    steps = np.linspace(0, layers * heads * narrowest // 2, points).round().astype(int)
    orders = np.array([generator.permutation(heads) for _ in range(layers)])
    found, done = [], 0
    for wanted in steps:
        while done < wanted:
            layer, place = generator.integers(layers), generator.integers(heads)
            row = choices[layer]
            if row[place] > (row[place - 1] if place else 0):
                row[place] -= 1
                done += 1
        mask = HeadMask.of_choices(np.take_along_axis(choices, orders, axis=1))
        score = (1 + len(found)) / points
        found.append(FrontPoint.of(mask, menu, context, score=score, log_likelihood=-1.0))
    front = Front.of(found, menu, context, model="m", seed=seed)
    assert all(front.nested) and len(front.points) == points
    return replace(front, chosen=chosen)


def alone(model: Any, front: Front, index: int, *, reordered: bool = False) -> Any:
    """The model of one point alone, with the front's order of heads or the one of its own."""
    mask = front.mask(index)
    order = mask.head_order() if reordered else front.head_order()
    with patch.object(HeadMask, "head_order", lambda _: order):
        return materialize(model, mask, front.windows)
