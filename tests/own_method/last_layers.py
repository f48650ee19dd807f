"""A search method in one file: a layer rule that keeps the last layers full."""

from __future__ import annotations

import importlib
from typing import Any

from bosch.budget import swa_budget
from bosch.search.methods import Method, register

register(
    "last_layers",
    Method("LAST", "layer rule", f"{__name__}:mask", "full layers at the end"),
)


def mask(num_layers: int, num_heads: int, swa_ratio: float) -> Any:
    """Whether each head is full: not the first ceil(rho N). Recipes load this without numpy."""
    numpy, units = importlib.import_module("numpy"), num_layers * num_heads
    is_full = numpy.arange(units) >= swa_budget(units, swa_ratio)
    return is_full.reshape(num_layers, num_heads)
