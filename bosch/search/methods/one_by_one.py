"""Methods that rank heads or layers by the objective for each of them alone."""

from __future__ import annotations

from bosch.search.methods import ANCHORS, Method, register
from bosch.search.settings import SearchSettings

_STRICT = frozenset({"strict"})


def _one_gradient(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    # In forward passes: forward, recomputation, and 2.5 for backward through attention.
    gradient = 5
    return ANCHORS + gradient + 1


def _every_layer(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    return ANCHORS + num_layers + 1


register("one_gradient", Method(
    "One gradient", "one by one", "bosch.search.rivals:one_gradient",
    "ranks heads by one gradient at the original model (as MoA does, arXiv 2406.14909)",
    _STRICT, _one_gradient, gradients=True,
))  # fmt: skip
register("single_ablation", Method(
    "One head", "one by one", "bosch.search.rivals:single_ablation",
    "ranks heads by the score when each alone slides (arXiv 2602.11374)",
    _STRICT, lambda _, layers, units: ANCHORS + layers * units + 1,
))  # fmt: skip
register("layer_ablation", Method(
    "One layer", "one by one", "bosch.search.rivals:layer_ablation",
    "ranks layers by the log-likelihood when each alone slides (arXiv 2606.27791)",
    _STRICT, _every_layer,
))  # fmt: skip
register("layer_restoration", Method(
    "One full layer", "one by one", "bosch.search.rivals:layer_restoration",
    "ranks layers by the log-likelihood when each alone is full (after arXiv 2512.20569)",
    _STRICT, _every_layer,
))  # fmt: skip
