"""Config classes of the hybrid models."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from bosch.families import Family


@functools.cache
def hybrid_config_class(family: Family) -> Any:
    """Config class of a family's hybrid models: its own, with `hybrid_attention`."""
    module = importlib.import_module(
        f"transformers.models.{family.module}.configuration_{family.module}"
    )
    base = getattr(module, f"{family.prefix}Config")
    name = f"Hybrid{family.prefix}Config"
    body = {
        "model_type": family.hybrid_type,
        "hybrid_attention": None,
        "__annotations__": {"hybrid_attention": "dict | None"},
        "__module__": __name__,
        "__doc__": f"Configuration of a {family.prefix} model with full and sliding heads.",
    }
    created = type(name, (base,), body)
    globals()[name] = created
    return created


def is_hybrid(config: Any) -> bool:
    """Whether a configuration is that of a hybrid model."""
    return str(getattr(config, "model_type", "")).startswith("hybrid_")
