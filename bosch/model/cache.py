"""Bytes of the KV cache of a running model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from bosch.hybrid import CACHE_NAME
from bosch.model.families import decoder_layers


def held_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache's keys, values and other states, each counted once."""
    storages = (tensor.untyped_storage() for layer in cache.layers for tensor in _tensors(layer))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def used_bytes(cache: Cache) -> int:
    """Bytes of the keys, values and other states that later passes read.

    transformers' sliding layers hold slices of a prompt, and free the rest with the next token.
    """
    return sum(tensor.nbytes for layer in cache.layers for tensor in _tensors(layer))


def _tensors(layer: Any) -> Iterator[Tensor]:
    """The states in one layer of a cache, of a hybrid or an ordinary model."""
    for held in getattr(layer, "parts", [layer]):
        states = (getattr(held, "keys", None), getattr(held, "values", None))
        yield from (x for x in states if x is not None)
    yield from _states(layer)


def _states(layer: Any) -> Iterator[Tensor]:
    """The states of fixed size in one layer of a cache."""
    for name in ("conv_states", "recurrent_states"):
        yield from (x for x in getattr(layer, name, {}).values() if x is not None)


def state_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's states of fixed size for one sequence."""
    if not decoder_layers(model.config).states:
        return 0
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    return sum(state.nbytes for layer in cache.layers for state in _states(layer))
