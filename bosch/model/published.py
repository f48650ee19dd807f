"""Weights of a hybrid under the names in published checkpoints of its family, for engines.

Hybrids have transformers' names, which differ where it renames modules or fuses experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from bosch.model.families import base_type

# Conversions of a family's published weights; None where there are none. The function is untyped.
_conversions: Any = get_checkpoint_conversion_mapping


def renames_weights(config: PreTrainedConfig) -> bool:
    """Whether published checkpoints have other names than hybrids of their family."""
    return _conversions(base_type(config)) is not None


def published_names(
    weights: Iterable[tuple[str, Tensor]], config: PreTrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, one by one, under the published names; no published weight combines several."""
    conversions = _conversions(base_type(config))
    if conversions is None:
        yield from weights
        return
    # The attributes that transformers reads of a model, of which only the weights exist here.
    model: Any = SimpleNamespace(_weight_conversions=conversions, config=config)
    for name, weight in weights:
        yield from revert_weight_conversion(model, {name: weight}).items()
