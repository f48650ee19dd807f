"""YaRN (Peng et al. 2023) on a loaded model: RoPE stretched for contexts beyond its positions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bosch.errors import UserError


def yarn_fault(config: Mapping[str, Any]) -> str | None:
    """Why the RoPE of a model with this config.json cannot be stretched; None where it can."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "its layers have RoPE of several kinds"
    kind = rope.get("rope_type", rope.get("type", "default"))
    return None if kind == "default" else f"its config.json scales RoPE already ({kind})"


@contextmanager
def yarn(model: Any, factor: float | None) -> Iterator[None]:
    """Stretch the model's RoPE by `factor` for as long as the context lasts; None leaves it.

    Raises:
        UserError: the model has no RoPE of one kind that could be stretched.
    """
    if factor is None:
        yield
        return
    config = model.config.get_text_config()
    fault = yarn_fault(config.to_dict())
    holders = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "rope_type") and hasattr(child, "inv_freq")
    ]
    if fault is None and not holders:
        fault = "it has no module for RoPE"
    if fault is not None:
        raise UserError(f"YaRN cannot be set on {type(model).__name__}: {fault}")
    positions = config.max_position_embeddings
    stretched = copy.deepcopy(config)
    stretched.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positions,
    }
    stretched.max_position_embeddings = int(positions * factor)
    for parent, name, child in holders:
        setattr(parent, name, type(child)(config=stretched).to(child.inv_freq.device))
    config.max_position_embeddings = stretched.max_position_embeddings
    try:
        yield
    finally:
        for parent, name, child in holders:
            setattr(parent, name, child)
        config.max_position_embeddings = positions
