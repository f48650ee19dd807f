"""Checks, before anything runs, that the head mask of the method `given` fits the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from bosch.errors import UserError
from bosch.search.mask_from_file import given_mask
from stages.faults import Fault, collected
from stages.formats import format_bytes
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe


def mask_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Faults of the file of search.mask; a model that is not known yet is not checked."""
    search = loaded.recipe[SearchConfig]
    if search.method != "given" or loaded.info is None:
        return
    faults: list[Fault] = []
    with collected(faults, "search.mask"):
        kinds, dtype = loaded.info.kinds, loaded.recipe.model.dtype
        shape = SimpleNamespace(
            num_layers=len(kinds.full), num_key_value_heads=kinds.heads, windows=search.menu
        )
        settings = search.settings(loaded.recipe.seed, search.ratio_for(kinds, dtype))
        mask = given_mask(shape, settings)
        cache = search.request_cache(kinds, dtype, 1)
        size = cache.bytes_of(mask)
        if cache.budget is not None and size > cache.allowed_bytes:
            raise UserError(
                f"allows {format_bytes(cache.allowed_bytes)}, and {search.mask} holds "
                f"{cache.text(size)}",
                f"search.budget.{cache.budget.name}",
            )
    yield from faults
