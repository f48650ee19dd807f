"""The common prefix of prompts, computed once for all batches.

Prompts of a batch are padded on the left, so a common prefix of C tokens ends C slots after the
padding of its row. All rows' caches are cut at slot C: a row with p padding slots takes C - p
tokens from the shared computation and computes the other p itself. This costs no more than the
padding, and leaves no gap between the prefix and the rest, so windows stay exact.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from bosch.model.cache import CACHE_NAME, HybridCache, keeps_every_token, padded_rows

logger = logging.getLogger(__name__)

# A shorter prefix is not worth a separate forward pass.
MIN_SHARED = 64


class SharedPrompt:
    """Keys and values of the common prefix of a model's prompts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_supported = keeps_every_token(self._new_cache())
        if not self._is_supported:
            logger.info("the common prefix of prompts is not shared: the model has other states")
        self._ids = self._previous = torch.empty(0, dtype=torch.long)
        self._cache: Cache | None = None

    def cache(self, ids: Tensor, mask: Tensor) -> Cache | None:
        """The cache from which `generate` continues prompts [B, T] that are padded on the left.

        None if the common prefix is too short, or the model's cache has states other than keys and
        values of every token.
        """
        if not self._is_supported:
            return None
        padding = mask.argmax(dim=1)
        most_padding = int(padding.max())
        # The last token is never in the cache: its logits begin the answer.
        shared = _common_prefix(ids, padding)[: ids.shape[1] - 1]
        previous, self._previous = self._previous, shared
        if len(ids) == 1:
            shared = shared[: _common_length(previous, shared)]
        cached = _common_length(self._ids, shared)
        if cached < len(shared) // 2 and len(shared) - most_padding >= MIN_SHARED:
            self._compute(shared)
            cached = len(shared)
        if cached - most_padding < MIN_SHARED:
            return None
        assert self._cache is not None
        return padded_rows(self._cache, padding, cached)

    @torch.inference_mode()
    def rest_logits(self, ids: Tensor, last_count: int) -> Tensor | None:
        """Logits of sequences [B, T], zero-padded on the right, without those of the common prefix.

        Includes at least the last `last_count` logits of each sequence. None for a short prefix.
        """
        prefix = _common_prefix(ids, ids.new_zeros(len(ids)))
        # Id 0 may be padding in one row and a token in another.
        length = int((prefix != 0).long().cumprod(0).sum())
        ids_of_cache = ids[:, : max(length - last_count, 0) + 1]
        cache = self.cache(ids_of_cache, torch.ones_like(ids_of_cache))
        if cache is None:
            return None
        output = self._model(
            input_ids=ids[:, cache.get_seq_length() :], use_cache=True, **{CACHE_NAME: cache}
        )
        return output.logits

    def _new_cache(self) -> Cache:
        new_cache = getattr(self._model, "new_cache", None)
        if new_cache is None:
            return DynamicCache(config=self._model.config)
        cache: HybridCache = new_cache()
        cache.activate_past_recording()
        return cache

    @torch.inference_mode()
    def _compute(self, ids: Tensor) -> None:
        cache = self._new_cache()
        self._model(input_ids=ids[None], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        self._ids, self._cache = ids, cache


def _common_prefix(ids: Tensor, padding: Tensor) -> Tensor:
    """The longest common prefix [C] of the rows' tokens."""
    first = ids[0, int(padding[0]) :]
    length = len(first)
    for row, start in zip(ids, padding.tolist(), strict=True):
        length = min(length, _common_length(first, row[start:]))
    return first[:length]


def _common_length(first: Tensor, second: Tensor) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differs = first[:length].to(second.device) != second[:length]
    return int(differs.int().argmax()) if bool(differs.any()) else length
