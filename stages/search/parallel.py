"""Why the processes of a run cannot share a search as the recipe asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bosch.search.methods import METHODS
from stages.exchange import split_faults
from stages.recipe import LoadedRecipe

if TYPE_CHECKING:
    from stages.search.stage import SearchConfig

_FIELD = "runtime.search_parallel"


def parallel_faults(loaded: LoadedRecipe, search: SearchConfig) -> Iterator[str]:
    """The faults of `runtime.search_parallel`."""
    parallel = loaded.recipe.runtime.search_parallel
    if parallel == "tensor":
        yield from _shards(loaded)
    if parallel == "context":
        yield from _split(loaded, search)


def _shards(loaded: LoadedRecipe) -> Iterator[str]:
    world = loaded.world
    if world.nodes > 1:
        yield (
            f"{_FIELD}: tensor shards the model over the processes of one node, "
            f"NNODES asks for {world.nodes}"
        )
    elif world.size == 1:
        yield f"{_FIELD}: tensor needs several processes, there is one (runtime.processes)"


def _split(loaded: LoadedRecipe, search: SearchConfig) -> Iterator[str]:
    yield from split_faults(loaded, _FIELD)
    if METHODS[search.method].reads_attention:
        yield (
            f"{_FIELD}: context splits what a search measures, and {search.method} reads the "
            "examples in one process; set data"
        )
    if search.sink is not None:
        yield f"{_FIELD}: search.sink is estimated on whole examples; set data, or leave it out"
