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
    """The first ceil(rho N) heads slide. Recipes load this file without numpy."""
    numpy, heads = (importlib.import_module(name) for name in ("numpy", "bosch.heads"))
    units = num_layers * num_heads
    is_full = numpy.arange(units) >= swa_budget(units, swa_ratio)
    return heads.HeadMask(is_full.reshape(num_layers, num_heads))
