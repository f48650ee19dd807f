"""Caches that hold states of a hybrid's layout.

The layout must not change while there are any. They are weak references, so that a cache which is
no longer used does not count.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from bosch.errors import UserError
from bosch.model.cache import SplitCacheLayer
from bosch.model.interface import layouts_of


class _Users(weakref.WeakSet[Any]):
    """Caches that hold states of a model; not copied with the model."""

    def __deepcopy__(self, memo: Any) -> _Users:
        return _Users()

    def __reduce__(self) -> Any:
        return _Users, ()


def _users_of(decoder: Any) -> _Users:
    return decoder.__dict__.setdefault("_bosch_users", _Users())


def forget_users(model: Any) -> None:
    """Raise UserError if something holds states of the model's layout, before it changes."""
    users = _users_of(model.get_decoder())
    if any(map(_holds_layout, users)):
        gc.collect()  # some are only in reference cycles
    live = [type(user).__name__ for user in users if _holds_layout(user)]
    if live:
        raise UserError(
            f"set_kv_budget: a {live[0]} of this model holds states of its current budget; delete "
            "it first"
        )
    users.clear()


def _holds_layout(user: Any) -> bool:
    return any(isinstance(layer, SplitCacheLayer) and layer.is_initialized for layer in user.layers)


def check_cached_layout(decoder: Any, cache: Any) -> None:
    """Register a cache; an empty one gets the layout. UserError for states of another layout."""
    users = _users_of(decoder)
    if cache in users:
        return
    for layer, layout in zip(getattr(cache, "layers", ()), layouts_of(decoder), strict=False):
        if layout is None or not isinstance(layer, SplitCacheLayer) or layer.layout == layout:
            continue
        if layer.is_initialized:
            raise UserError(
                "the cache holds states of another KV budget than the model's: begin with a new "
                "cache after set_kv_budget"
            )
        layer.layout = layout
    users.add(cache)
