"""YaRN (Peng et al. 2023) on a loaded model: RoPE stretched for contexts beyond its positions."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.errors import UserError
from bosch.model.families import HYBRID_PREFIX, rope_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ORIGINAL = "original_max_position_embeddings"
# Model cards have the number in JSON, as a server option, or in a sentence.
_IN_CARD = re.compile(_ORIGINAL + r"[\W_]{1,8}(\d{3,8})\b")
# Kinds of RoPE without scaling; mrope is an older name of the one for images.
_UNSCALED = ("default", "mrope")
# Families without RoPE, and phimoe, which needs fields that YaRN does not have.
_NO_YARN = ("biogpt", "jamba", "nemotron_h", "opt", "phimoe")


def yarn_fault(config: Mapping[str, Any]) -> str | None:
    """Why the RoPE of a model with this config.json cannot be stretched; None if it can."""
    rope = rope_of(config)
    if not isinstance(rope, Mapping):
        return f"its config.json has {rope!r:.60} in place of RoPE's parameters"
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "its layers have RoPE of several kinds"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _UNSCALED:
        return f"its config.json scales RoPE already ({kind})"
    model_type = str(config.get("model_type")).removeprefix(HYBRID_PREFIX)
    return f"models of type '{model_type}' have no YaRN" if model_type in _NO_YARN else None


def original_positions(config: Mapping[str, Any], card: Path | None = None) -> int | None:
    """The length that a model was trained at, which YaRN stretches; None if it is not stated.

    It is in config.json or in the model card, as for Qwen3's chat models, whose
    max_position_embeddings of 40,960 includes room for an answer.
    """
    rope = rope_of(config)
    stated = rope.get(_ORIGINAL) if isinstance(rope, Mapping) else None
    for value in (stated, config.get(_ORIGINAL)):
        if isinstance(value, int):
            return value
    try:
        text = card.read_bytes().decode() if card is not None else ""
    except (OSError, ValueError):
        return None
    lengths = {int(number) for number in _IN_CARD.findall(text)}
    return lengths.pop() if len(lengths) == 1 else None


@contextmanager
def yarn(
    model: PreTrainedModel,
    factor: float | None,
    original: int | None = None,
    card: Path | None = None,
) -> Iterator[None]:
    """Stretch the model's RoPE by `factor` inside the block; None does nothing.

    `original`: the length to stretch, else config.json's or the card's. UserError if impossible.
    """
    if factor is None:
        yield
        return
    config = model.config.get_text_config()
    fault = yarn_fault(config.to_dict())
    holders = [
        (parent, name, child)
        for parent in model.get_decoder().modules()  # RoPE of images is outside the decoder
        for name, child in parent.named_children()
        if hasattr(child, "rope_type") and hasattr(child, "inv_freq")
    ]
    if fault is None and not holders:
        fault = "it has no module for RoPE"
    if fault is not None:
        raise UserError(f"YaRN cannot be set on {type(model).__name__}: {fault}")
    positions = config.max_position_embeddings
    original = original or original_positions(config.to_dict(), card) or positions
    stretched = copy.deepcopy(config)
    scaling = {"rope_type": "yarn", "factor": factor, _ORIGINAL: original}
    stretched.rope_parameters = {**config.rope_parameters, **scaling}
    stretched.max_position_embeddings = int(original * factor)
    for parent, name, child in holders:
        setattr(parent, name, type(child)(config=stretched).to(child.inv_freq.device))
    config.max_position_embeddings = stretched.max_position_embeddings
    try:
        yield
    finally:
        for parent, name, child in holders:
            setattr(parent, name, child)
        config.max_position_embeddings = positions
